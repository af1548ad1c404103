"""Dispatch modes that record the calls of threads, and track the location of each thread in the program."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from opgrip.capture.program.environment import describe_autocast
from opgrip.capture.program.places import BACKWARD, FORWARD, Location, is_running
from opgrip.capture.signatures.predictions import CallNode, CallPredictor
from opgrip.capture.timing.device_time import DeviceTimer
from opgrip.capture.timing.page_faults import NONE_OPEN, FaultCounter, OwnWork
from opgrip.capture.torch_compat.compiler_private import OrderlyMode
from opgrip.capture.torch_compat.torch_private import NO_SEQUENCE, backward_pass

if TYPE_CHECKING:
    from opgrip.capture.recording.recorder import Recorder


@dataclass(frozen=True, slots=True)
class ThreadCalls:
    """Some calls of one thread.

    calls : (N, 4), for each call the number of its (signature, scope) pair, start and end in ns, and autograd's
        sequence number
    tensors : (N,), number of tensors of each call
    flows : (sum of `tensors`,), storage numbers of these tensors, call after call
    """

    mode: ThreadMode
    calls: NDArray[np.int64]
    tensors: NDArray[np.int64]
    flows: NDArray[np.int64]
    open_since_ns: int = NONE_OPEN

    def __len__(self) -> int:
        return len(self.calls)

    def part(self, first: int, stop: int) -> ThreadCalls:
        ends = np.concatenate([[0], np.cumsum(self.tensors)])
        own, flows = slice(first, stop), slice(ends[first], ends[stop])
        open_since_ns = min(self.open_since_ns, int(self.calls[stop:, 1].min(initial=NONE_OPEN)))
        return ThreadCalls(self.mode, self.calls[own], self.tensors[own], self.flows[flows], open_since_ns)

    def selected(self, flags: NDArray[np.bool_]) -> ThreadCalls:
        flows = self.flows[np.repeat(flags, self.tensors)]
        return replace(self, calls=self.calls[flags], tensors=self.tensors[flags], flows=flows)

    def copied(self) -> ThreadCalls:
        return replace(self, calls=self.calls.copy(), tensors=self.tensors.copy(), flows=self.flows.copy())


# sequence number of a call without an autograd node, or of a backward call without a forward call
UNPAIRED = -(1 << 62)


class ThreadMode(OrderlyMode):
    """A dispatch mode that tracks its thread's location: module, function and phase.

    rows : for each call that is not written yet, one after another: number of its (signature, scope) pair, start and
        end in ns, autograd sequence number (negative in a backward pass), and storage numbers
    labels : open labels of `record_function`, each with a number of the object that closes it
    """

    number: int
    idents: tuple[int, ...]
    thread_name: str
    last: CallNode
    started: int
    predictions: CallPredictor
    rows: list[int]
    labels: list[tuple[str, int]]
    first_sequence: int
    idle: bool
    generations: tuple[int, int | None]
    device: DeviceTimer
    faults: FaultCounter
    own_work: OwnWork
    ended = False
    launched = 0

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder
        self.place = recorder.places.at(autocast=describe_autocast())
        self._in_backward = False
        self._before_backward = FORWARD
        self._outer: list[tuple[object, Location]] = []
        self._frames: list[tuple[object, FrameType]] = []

    @abstractmethod
    def begin(self) -> None: ...

    @abstractmethod
    def call(
        self,
        name: str,
        kind: str,
        run: Callable[[], Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        shown: Callable[[Any], Any] | None = None,
    ) -> Any:
        """Run a function that the dispatcher does not see, and record its call and the calls inside it.

        args, kwargs : the function's arguments, for the record only
        shown : returns the result to record; None to record the result unchanged
        """

    @abstractmethod
    def note_label(self, name: str, label: str, number: int) -> None:
        """Record a call of the operator `name`, which opens or closes a label, without running the operator.

        number : identifies the object that closes the label
        """

    @abstractmethod
    def running(self, last_start: int, last_end: int) -> list[tuple[int, CallNode]]: ...

    @abstractmethod
    def check_settings(self) -> None: ...

    @abstractmethod
    def forget_calls(self) -> None:
        """Look up the signatures of all later calls by key again."""

    @abstractmethod
    def schedule_observation(self, signature: int) -> None: ...

    @abstractmethod
    def storages_in(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[int]: ...

    def enter(self, token: object, place: Location, frame: FrameType | None = None) -> None:
        """Set the thread's location until `leave` is called with the same token, or until `frame` ends."""
        # if this is interrupted, `leave_to` or the end of the frame restores the location
        if frame is not None:
            self._frames.append((token, frame))
        self._outer.append((token, self.place))
        self._go(place)

    def leave(self, token: object) -> None:
        """Return to the location before the call of `enter` with this token."""
        outer = self._outer
        depth = len(outer) - 1
        if depth < 0 or outer[depth][0] is not token:
            depth = next((depth for depth in range(depth, -1, -1) if outer[depth][0] is token), -1)
            if depth < 0:
                return
        self.leave_to(depth)

    def leave_to(self, depth: int) -> None:
        outer = self._outer
        if len(outer) > depth:
            inner_frames = outer[depth:] if self._frames else ()
            self._go(outer[depth][1], depth)
            for token, _ in inner_frames:
                self._forget_frame(token)

    def depth(self) -> int:
        return len(self._outer)

    def set_autocast(self, autocast: str) -> None:
        self._go(self.recorder.places.autocast(self.place, autocast))

    def settle(self) -> None:
        if self._in_backward and backward_pass() < 0:
            self._leave_backward()
        while self._frames and not is_running(self._frames[-1][1]):
            token = self._frames[-1][0]
            self.leave(token)
            self._forget_frame(token)

    def _forget_frame(self, token: object) -> None:
        self._frames = [entry for entry in self._frames if entry[0] is not token]

    def _go(self, place: Location, depth: int | None = None, in_backward: bool | None = None) -> None:
        # These statements contain no call, so that no exception of the program can occur between them: the thread is in
        # either the old or the new location, and predicts nothing.
        before, self.place = self.place, place
        last, self.last = self.last, self.predictions.nowhere
        if depth is not None:
            del self._outer[depth:]
        if in_backward is not None:
            self._in_backward = in_backward
        self.last = self.predictions.start_of(place, last, before)

    def _enter_backward(self, autograd_node: Any) -> int:
        if not self._in_backward:
            self._begin_backward()
        number = autograd_node._sequence_nr()
        return UNPAIRED if number == NO_SEQUENCE else -1 - int(number)

    def _begin_backward(self) -> None:
        self._before_backward = self.place.phase
        self._go(self.recorder.places.phase(self.place, BACKWARD), in_backward=True)

    def _leave_backward(self) -> None:
        place, places = self.place, self.recorder.places
        phase = self._before_backward if place.phase == BACKWARD else place.phase
        self._go(places.phase(place, phase), in_backward=False)


class ThreadModes:
    """The dispatch modes of all threads of a process."""

    def __init__(self, make_mode: Callable[[], ThreadMode], by_steps: bool = False) -> None:
        self.all: list[ThreadMode] = []
        self.idle = False
        self.by_steps = by_steps
        self.next_number = count().__next__
        self._make_mode = make_mode
        self._local = threading.local()

    def begin(self) -> None:
        """Keep only this thread's mode, if it has one."""
        mode: ThreadMode | None = getattr(self._local, "mode", None)
        self._local = threading.local()
        self.all[:] = []
        if mode is not None:
            self._local.mode = mode
            self.all.append(mode)
            mode.begin()

    def here(self) -> ThreadMode:
        mode: ThreadMode | None = getattr(self._local, "mode", None)
        if mode is None:
            mode = self._make_mode()
            mode.idle = mode.idle or self.by_steps
            # append first: an interruption must not leave a thread with a mode that is never read
            self.all.append(mode)
            self._local.mode = mode
        return mode

    def in_step(self) -> ThreadMode | None:
        """Return the mode of this thread, or None if only steps are recorded and the thread is not in a step."""
        if not self.by_steps:
            return self.here()
        mode: ThreadMode | None = getattr(self._local, "mode", None)
        return None if mode is None or mode.idle else mode

    def of_engine(self) -> ThreadMode:
        mode = self.here()
        mode.idle = self.idle
        # a thread of the autograd engine inherits the mode of another thread
        mode.was_entered = True
        return mode

    def set_idle(self, idle: bool) -> None:
        self.idle = idle
        for mode in self.all:
            mode.idle = idle

    def forget(self, mode: ThreadMode) -> None:
        with suppress(ValueError):
            self.all.remove(mode)

    @property
    def waiting(self) -> int:
        return sum(len(mode.rows) for mode in tuple(self.all))
