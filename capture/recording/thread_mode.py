"""The mode that records one thread and follows where that thread is, and the modes of all threads."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from types import FrameType
from typing import TYPE_CHECKING, Any

from opgrip.capture.program.environment import describe_autocast
from opgrip.capture.program.places import BACKWARD, FORWARD, Location, is_running
from opgrip.capture.signatures.predictions import CallPoint, CallPredictor
from opgrip.capture.timing.device_time import DeviceTimer
from opgrip.capture.timing.page_faults import FaultCounter, OwnWork
from opgrip.capture.torch_compat.compiler_private import OrderlyMode
from opgrip.capture.torch_compat.torch_private import NO_SEQUENCE, current_autograd_node

if TYPE_CHECKING:
    from opgrip.capture.recording.recorder import Recorder

UNPAIRED = -(1 << 62)
"""Sequence number of a call that made no node, and of one in a backward pass whose node no forward call made."""


class ThreadMode(OrderlyMode):
    """A dispatch mode that follows where its thread is: in which modules and functions, in a backward pass or not.

    What it does with calls is up to the class below it, `RecordingMode`.

    Attributes
    ----------
    number : of the mode; a thread's ident goes to another thread when it ends
    idents : numbers by which an accelerator's records may name the thread
    place : where the thread is; hooks change it by `enter` and `leave`
    last : node of the operator call that was entered last, or where the calls of a place begin
    started : start in ns of that call
    rows : of each call: pair, start and end in ns, sequence number of autograd (negative in a backward pass), and the
        storages of its tensors, inputs before outputs. A call is added in one step that nothing can interrupt
    first_sequence : sequence number of autograd before the first call
    idle : calls are not recorded
    epochs : first and last epoch of the recorder's tables whose numbers this thread may use; last is None while the
        thread looks a call up
    device, faults, own_work : device times, page faults and the capture's own work between the calls of this thread
    ended : whether the thread is known to have ended
    """

    number: int
    idents: tuple[int, ...]
    thread_name: str
    last: CallPoint
    started: int
    predictions: CallPredictor
    rows: list[int]
    first_sequence: int
    idle: bool
    epochs: tuple[int, int | None]
    device: DeviceTimer
    faults: FaultCounter
    own_work: OwnWork
    ended = False

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder
        self.place = recorder.places.at(autocast=describe_autocast())
        self._in_backward = False
        self._before_backward = FORWARD
        self._outer: list[tuple[object, Location]] = []
        self._frames: list[tuple[object, FrameType]] = []

    @abstractmethod
    def begin(self) -> None:
        """Begin with empty tables at the thread's current place."""

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
        """Record and run a function that the dispatcher does not see; the calls that it makes are inside it.

        Parameters
        ----------
        run : calls the function
        args, kwargs : of the function, for the record only
        shown : returns the result as it is recorded; None to record it unchanged
        """

    @abstractmethod
    def running(self, last_start: int, last_end: int) -> list[tuple[int, CallPoint]]:
        """Return start in ns and node of the calls that the thread is in, outermost first.

        Parameters
        ----------
        last_start, last_end : of the last call that was taken from `rows`
        """

    @abstractmethod
    def look_at_settings(self) -> None:
        """Check whether settings of torch, which scopes refer to, have changed."""

    @abstractmethod
    def look_at(self, signature: int) -> None:
        """Look at the values of the next call of a signature from each point where it was made before."""

    @abstractmethod
    def storages_in(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[int]:
        """Return the numbers of the memory of a call's tensors."""

    def enter(self, token: object, place: Location, frame: FrameType | None = None) -> None:
        """Go to a place until `leave` is called with the same token.

        Parameters
        ----------
        frame : leaves the place when it ends, if nothing else reports that
        """
        # if interrupted, `leave_to` or the frame's end mend it
        if frame is not None:
            self._frames.append((token, frame))
        self._outer.append((token, self.place))
        self._go(place)

    def leave(self, token: object) -> None:
        """Return to where the thread was before it entered with this token, leaving all places within."""
        outer = self._outer
        depth = len(outer) - 1
        if depth < 0 or outer[depth][0] is not token:
            depth = next((depth for depth in range(depth, -1, -1) if outer[depth][0] is token), -1)
            if depth < 0:
                return
        self.leave_to(depth)

    def leave_to(self, depth: int) -> None:
        """Leave all places that were entered since `depth()` returned `depth`, if any."""
        outer = self._outer
        if len(outer) > depth:
            left = outer[depth:] if self._frames else ()
            self._go(outer[depth][1], depth)
            for token, _ in left:
                self._forget_frame(token)

    def depth(self) -> int:
        """Return how many places of modules and functions the thread has entered and not left."""
        return len(self._outer)

    def set_autocast(self, autocast: str) -> None:
        """Note what autocast is on for in this thread."""
        self._go(self.recorder.places.autocast(self.place, autocast))

    def settle(self) -> None:
        """Leave a backward pass, or a step that failed, if it is over."""
        if self._in_backward and current_autograd_node() is None:
            self._leave_backward()
        while self._frames and not is_running(self._frames[-1][1]):
            token = self._frames[-1][0]
            self.leave(token)
            self._forget_frame(token)

    def _forget_frame(self, token: object) -> None:
        self._frames = [entry for entry in self._frames if entry[0] is not token]

    def _go(self, place: Location, depth: int | None = None, in_backward: bool | None = None) -> None:
        """Go to a place, and leave all that was entered beyond a depth."""
        # no call stands between these, so no exception of the program can: the thread is in the one place or in the
        # other, and predicts nothing
        before, self.place = self.place, place
        last, self.last = self.last, self.predictions.nowhere
        if depth is not None:
            del self._outer[depth:]
        if in_backward is not None:
            self._in_backward = in_backward
        self.last = self.predictions.start_of(place, last, before)

    def _enter_backward(self, autograd_node: Any) -> int:
        if not self._in_backward:
            self._before_backward = self.place.phase
            self._go(self.recorder.places.phase(self.place, BACKWARD), in_backward=True)
        number = autograd_node._sequence_nr()
        return UNPAIRED if number == NO_SEQUENCE else -1 - int(number)

    def _leave_backward(self) -> None:
        self._go(self.recorder.places.phase(self.place, self._before_backward), in_backward=False)


class ThreadModes:
    """The modes of all threads of a process.

    Attributes
    ----------
    all : one mode for each thread, in the order in which they were first seen
    idle : no calls are recorded
    by_steps : a thread is recorded only while it is in a step, in which its mode is not idle
    next_number : returns the number of the next mode
    """

    def __init__(self, make_mode: Callable[[], ThreadMode], by_steps: bool = False) -> None:
        self.all: list[ThreadMode] = []
        self.idle = False
        self.by_steps = by_steps
        self.next_number = count().__next__
        self._make_mode = make_mode
        self._local = threading.local()

    def begin(self) -> None:
        """Begin with the mode of this thread only, as in a forked process, in which no other thread is left."""
        mode: ThreadMode | None = getattr(self._local, "mode", None)
        self._local = threading.local()
        self.all[:] = []
        if mode is not None:
            self._local.mode = mode
            self.all.append(mode)
            mode.begin()

    def here(self) -> ThreadMode:
        """Return the mode that records this thread."""
        mode: ThreadMode | None = getattr(self._local, "mode", None)
        if mode is None:
            mode = self._make_mode()
            mode.idle = mode.idle or self.by_steps
            # first: an interruption must not leave a thread with a mode that nobody reads
            self.all.append(mode)
            self._local.mode = mode
        return mode

    def in_step(self) -> ThreadMode | None:
        """Return the mode that records this thread; None if only steps are recorded and the thread is in none."""
        if not self.by_steps:
            return self.here()
        mode: ThreadMode | None = getattr(self._local, "mode", None)
        return None if mode is None or mode.idle else mode

    def of_engine(self) -> ThreadMode:
        """Return the mode of this thread, which autograd runs for one that is recorded."""
        mode = self.here()
        mode.idle = self.idle
        return mode

    def set_idle(self, idle: bool) -> None:
        """Let calls of all threads pass, or record them."""
        self.idle = idle
        for mode in self.all:
            mode.idle = idle

    def forget(self, mode: ThreadMode) -> None:
        """Forget the mode of a thread that has ended, after its calls were taken."""
        with suppress(ValueError):
            self.all.remove(mode)

    @property
    def waiting(self) -> int:
        """Number of integers in the rows of calls that nobody has taken."""
        return sum(len(mode.rows) for mode in tuple(self.all))
