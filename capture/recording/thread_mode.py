"""Dispatch modes that see every operator that runs in their threads, and record it with its location in the program."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from threading import get_ident
from types import FrameType, FunctionType
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import is_grad_enabled, is_inference_mode_enabled

from opgrip.capture.program.environment import describe_autocast, read_settings
from opgrip.capture.program.places import BACKWARD, FORWARD, Location, is_running
from opgrip.capture.recording.storages import SWEEP, SWEEP_BYTES
from opgrip.capture.recording.wrapped_operators import higher_order_node, measured, schedule_observation
from opgrip.capture.signatures.predictions import (
    CAREFUL,
    LISTED,
    ONE,
    SEVERAL,
    TWO,
    CallNode,
    CallPredictor,
    Recognizer,
    sharing,
)
from opgrip.capture.signatures.signatures import argument_tensors, names_meta, tensors_in
from opgrip.capture.timing.device_time import DeviceTimer
from opgrip.capture.timing.kernel_times import identities_here
from opgrip.capture.timing.page_faults import NONE_OPEN, FaultCounter, OwnWork
from opgrip.capture.torch_compat.compiler_private import (
    OrderlyMode,
    hide_from_compiler,
    is_higher_order,
    see_higher_order,
)
from opgrip.capture.torch_compat.torch_private import (
    NO_SEQUENCE,
    backward_pass,
    current_autograd_node,
    is_fake,
    is_faking,
    is_made_of_tensors,
    pin,
    sequence_number,
    storage_address,
    unpin,
    with_tensors,
    without_functions,
)
from opgrip.errors import interrupted_by, is_from_program
from opgrip.platform import perf_counter_ns
from opgrip.traces.schema.records import EXTENSION, FUNCTION, IN_GRAPH, ON_FAKE, ON_META, OPERATOR
from opgrip.traces.table.profiler_labels import MARK_ENTER, close_label

if TYPE_CHECKING:
    from opgrip.capture.recording.recorder import Recorder

# sequence number of a call without an autograd node, or of a backward call without a forward call
UNPAIRED = -(1 << 62)


NOTHING: Mapping[str, Any] = {}

Storages = tuple[int, ...]
NO_STORAGES: Storages = ()

PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
# types in a tuple of results that is recorded without a search for tensors in it
RESULTS = frozenset({torch.Tensor, type(None)})

CLOSES_LABEL = torch.ops.profiler._record_function_exit._RecordFunction


class ThreadMode(OrderlyMode):
    """A dispatch mode that records the calls of its thread, and tracks the thread's location: module, function, phase.

    rows : for each call that is not written yet, one after another: number of its (signature, scope) pair, start and
        end in ns, autograd sequence number (negative in a backward pass), and storage numbers
    labels : open labels of `record_function`, each with a number of the object that closes it
    """

    supports_higher_order_operators = True
    ended = False
    launched = 0

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        see_higher_order(type(self))
        self.recorder = recorder
        self.place = recorder.places.at(autocast=describe_autocast())
        # a thread's ident is reused after the thread ends
        self.number = recorder.threads.next_number()
        self.idle = recorder.threads.idle
        self._ahead = recorder.write_ahead is not None
        self._around: list[tuple[int, CallNode]] = []
        self._in_backward = False
        self._before_backward = FORWARD
        self._outer: list[tuple[object, Location]] = []
        self._frames: list[tuple[object, FrameType]] = []
        self.begin()

    def begin(self) -> None:
        self.ident = get_ident()
        self.idents = identities_here()
        # the autograd engine's threads are not Python threads
        names = (thread.name for thread in threading.enumerate() if thread.ident == self.ident)
        self.thread_name = next(names, "autograd")
        self.rows: list[int] = []
        self.labels: list[tuple[str, int]] = []
        self.started = 0
        self.first_sequence = sequence_number()
        self._pinned_bytes = 0
        self.device = DeviceTimer()
        self.faults = FaultCounter()
        self.own_work = OwnWork()
        self.predictions = CallPredictor()
        self.last: CallNode = self.predictions.nowhere
        self.generations: tuple[int, int | None] = (self.recorder.generations.current, None)
        self._settings = read_settings()
        self._storages = self.recorder.storages
        self._numbers = self._storages.numbers
        self._new_number = self._storages.new_number
        self._young = self._storages.young

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # returns True if torch should wrap the handler in its guard
        return not cls._hidden

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.idle or (types and not PLAIN.issuperset(types)):
            return self._pass_by(func, types, args, kwargs or {})
        autograd_node = current_autograd_node()
        if autograd_node is not None and get_ident() != self.ident:
            # the autograd engine's threads inherit the mode of the thread that ran the forward pass
            return self.recorder.threads.of_engine().__torch_dispatch__(func, types, args, kwargs)
        node: CallNode | None = None
        argument_storages: Storages | None = None
        try:
            grad = is_grad_enabled()
            if autograd_node is None:
                # the engine's last callbacks run without a node
                if self._in_backward and backward_pass() < 0:
                    self._leave_backward()
                # autograd makes no node while gradients are off
                sequence = sequence_number() if grad else UNPAIRED
            else:
                sequence = self._enter_backward(autograd_node)
            node = self.last.after
            if (
                node.func is func
                and node.grad is grad
                and (node.check_both(args, kwargs) if kwargs else node.check(args))
            ):
                layout, number = node.layout, self._numbers.get
                if layout == ONE:
                    memory = number(storage_address(args[0]))
                    if memory is not None:
                        argument_storages = (memory,)
                elif layout == TWO:
                    memory, other = number(storage_address(args[0])), number(storage_address(args[1]))
                    if memory is not None and other is not None and (memory != other) is (node.sharing is None):
                        argument_storages = (memory, other)
                else:
                    argument_storages = self._match_storages(node, args, kwargs)
            if argument_storages is None:
                node, argument_storages = self._find(func, args, kwargs or NOTHING)
            self.last = node
        except Exception as error:
            node, argument_storages = self._find_after(error, func, args, kwargs or NOTHING)
        if node is None or argument_storages is None:
            return func(*with_tensors(func, args), **(kwargs or {}))
        self.started = start = perf_counter_ns()
        if self._ahead and not is_faking():
            self.recorder.write_ahead_of(node.number)
        try:
            result = node.op(*args, **kwargs) if kwargs else node.op(*args)
        except BaseException as error:
            self._keep(node, argument_storages, start, perf_counter_ns(), sequence, None, error)
            raise
        try:
            end = perf_counter_ns()
            if node.layout and type(result) is torch.Tensor:
                alias = node.alias
                if alias >= 0:
                    result_storage = argument_storages[alias]
                else:
                    storage = result.untyped_storage()
                    address, numbers = pin(storage), self._numbers
                    if address in numbers:
                        unpin(address)
                    else:
                        new_number = next(self._new_number)
                        if address in numbers:
                            # another thread was faster
                            unpin(address)
                        else:
                            numbers[address] = new_number
                            self._young.append(address)
                            if result.is_cpu:
                                self._pinned_bytes += storage.nbytes()
                            if len(self._young) > SWEEP or self._pinned_bytes > SWEEP_BYTES:
                                self._sweep()
                    result_storage = numbers[address]
                # This and returning are one step for an interrupt of the program: the call is either recorded or
                # counted as lost.
                rows = self.rows
                rows += (node.pair, start, end, sequence, *argument_storages, result_storage)
            elif node.layout and type(result) is tuple and RESULTS.issuperset(map(type, result)):
                result_storages = self._storages.numbers_of(result)
                tensors = len(argument_storages) + len(result_storages)
                pair = self.recorder.scopes.pair(node.number, node.scope, tensors)
                rows = self.rows
                rows += (pair, start, end, sequence, *argument_storages, *result_storages)
            else:
                self._keep(node, argument_storages, start, end, sequence, result, None)
        except BaseException as error:
            if isinstance(error, NotImplementedError) and not is_from_program(error):
                # a sparse result has no storage
                node.layout = CAREFUL
                self._keep(node, argument_storages, start, end, sequence, result, None)
            else:
                self.recorder.lost.lose(str(func), error)
        return result

    _hidden = hide_from_compiler(cast(FunctionType, __torch_dispatch__))

    def _pass_by(self, func: Any, types: Sequence[type], args: Any, kwargs: Any) -> Any:
        if self.idle:
            return func(*args, **kwargs)
        self.recorder.lost.pass_by(str(func), types)
        if all(kind in PLAIN or is_made_of_tensors(kind) for kind in types):
            # the operators that it calls are dispatched here
            return NotImplemented
        # for example, tensors that act as placeholders while a program is traced
        return func(*args, **kwargs)

    def _match_storages(self, node: CallNode, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Storages | None:
        number = self._numbers.get
        if node.layout == SEVERAL:
            numbers = [number(storage_address(args[place])) for place in node.places]
        elif node.layout == LISTED:
            numbers = [number(storage_address(item)) for item in args[0]]
        else:
            numbers = list(self.storages_in(args, kwargs or NOTHING))
        if None in numbers:
            return None
        alone = len(set(numbers)) == len(numbers)
        storages = cast(Storages, tuple(numbers))
        return (
            storages if (alone and node.sharing is None) or (not alone and sharing(storages) == node.sharing) else None
        )

    def _sweep(self) -> None:
        began, self._pinned_bytes = perf_counter_ns(), 0
        self._storages.sweep()
        if self.recorder.kernels is not None:
            self.recorder.kernels.renew(self.recorder.graphs)
        self._spent(began)

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
        if self.idle:
            return run()
        depth, around, node = self.depth(), len(self._around), None
        argument_storages, start, sequence = NO_STORAGES, 0, 0
        try:
            # this may leave some locations
            began = self._begin_search()
            depth = self.depth()
            autograd_node = current_autograd_node()
            sequence = sequence_number() if autograd_node is None else self._enter_backward(autograd_node)
            argument_storages = self.storages_in(args, kwargs)
            entry = self._by_key(name, kind, args, kwargs, argument_storages)
            scope, pair = self.recorder.scopes.point(entry.number, self.place, len(argument_storages) + 1)
            node = CallNode(entry, (), scope, pair, None)
            self.enter(node, self.recorder.places.inside(self.place, name, kind == FUNCTION))
            # the device time of a function is the device time of the calls inside it
            values, on_device = (*args, *kwargs.values()), kind != FUNCTION
            run = measured(self, entry.number, run, None, values, lambda: start, on_device) or run
            # a compiled region frees its inputs while it runs
            del args, kwargs, values
            self._end_search(began)
        except BaseException as error:
            self.leave_to(depth)
            self.recorder.lost.drop(name, error)
            node = None
        if node is None:
            return run()
        result, raised = None, None
        try:
            start = perf_counter_ns()
            self._around.append((start, node))
            if self._ahead:
                self.recorder.write_ahead_of(node.number)
            result = run()
        except BaseException as error:
            raised = error
            raise
        finally:
            try:
                end = perf_counter_ns()
                del self._around[around:]
                self.leave_to(depth)
                self._keep(node, argument_storages, start, end, sequence, result, raised, shown)
            except BaseException as error:
                del self._around[around:]
                self.leave_to(depth)
                self.recorder.lost.lose(name, error)
            # otherwise the error and this frame would keep each other alive
            raised = None
        return result

    def running(self, last_start: int, last_end: int) -> list[tuple[int, CallNode]]:
        running = list(self._around)
        started, current = self.started, self.last
        # If the call is over, its row is still here, was taken, or the call ended before one that was taken.
        if not self.rows and started != last_start and started >= last_end and current.pair >= 0:
            running.append((started, current))
        return running

    def check_settings(self) -> None:
        settings = read_settings()
        if settings != self._settings:
            self._settings = settings
            self.predictions.forget_nodes()
            self.last = self.predictions.nowhere

    def forget_calls(self) -> None:
        """Look up the signatures of all later calls by key again."""
        self.predictions = CallPredictor()
        self.last = self.predictions.nowhere

    def schedule_observation(self, signature: int) -> None:
        for node in self.predictions.nodes_of(signature):
            schedule_observation(node, self)

    def storages_in(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Storages:
        return tuple([self._storages.number(tensor) for tensor in argument_tensors(args, kwargs)])

    def _find(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[CallNode, Storages | None]:
        # a call on meta or fake tensors is only counted: the last node and None
        began = self._begin_search()
        # reading a tensor must not call the `__torch_function__` of its class
        with without_functions():
            tensors = argument_tensors(args, kwargs)
            on_meta = True in [tensor.is_meta for tensor in tensors] or names_meta(args, kwargs)
            in_graph = with_tensors(func, args) is not args
            if on_meta or in_graph or is_faking():
                reason = ON_META if on_meta else IN_GRAPH if in_graph else ON_FAKE
                self.recorder.lost.count_without_work(str(func), reason)
                self._end_search(began)
                return self.last, None
            argument_storages = tuple([self._storages.number(tensor) for tensor in tensors])
            node = self.predictions.successor(self.last, func, args, kwargs, sharing(argument_storages))
            if node is None:
                node = self._look_up(func, args, kwargs, argument_storages)
        self._end_search(began)
        return node, argument_storages

    def _find_after(
        self, error: Exception, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[CallNode | None, Storages | None]:
        # the comparison with the predicted call is known to fail for nested tensors
        try:
            if not any(tensor.is_nested for tensor in argument_tensors(args, kwargs)):
                raise error
            node, argument_storages = self._find(func, args, kwargs)
            self.last = node
        except Exception as reason:
            self.recorder.lost.drop(str(func), reason)
            return None, None
        return node, argument_storages

    def _look_up(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], argument_storages: Storages
    ) -> CallNode:
        if is_higher_order(func):
            outer = higher_order_node(self, func, args, kwargs, len(argument_storages))
            if outer is not None:
                return outer
        entry = self.predictions.recent(func, args, kwargs, sharing(argument_storages))
        if entry is None:
            entry = self._by_key(func, OPERATOR, args, kwargs, argument_storages)
        place, number = self.place, entry.number
        point = lambda: self.recorder.scopes.point(number, place, len(argument_storages) + 1)  # noqa: E731
        modes = is_grad_enabled(), is_inference_mode_enabled()
        node = self.predictions.node(self.last, place, entry, modes, point)
        signatures = self.recorder.signatures
        is_due = self.recorder.observations.is_due(number) or signatures.is_unread(number)
        if is_due and not signatures.is_open(number):
            schedule_observation(node, self)
        return node

    def note_label(self, name: str, label: str, number: int) -> None:
        """Record a call of the operator `name`, which opens or closes a label, without running the operator.

        number : identifies the object that closes the label
        """
        if name == MARK_ENTER:
            self.labels.append((label, number))
        self.call(name, EXTENSION, lambda: None, (label,) if name == MARK_ENTER else self._closing(number), {})

    def _closing(self, number: int) -> tuple[str, ...]:
        if self.labels and self.labels[-1][1] == number:
            self.labels.pop()
            return ()
        closed = close_label(number, self.labels, [mode.labels for mode in tuple(self.recorder.threads.all)])
        return ("" if closed is None else closed[0],)

    def _by_key(self, func: Any, kind: str, args: Any, kwargs: Any, argument_storages: Storages) -> Recognizer:
        if func is CLOSES_LABEL:
            args = self._closing(hash(args[0])) or args
        number = self.recorder.signatures.number(func, kind, args, kwargs)
        family = self.recorder.signatures.families[number]
        if kind == OPERATOR and not self.recorder.signatures.is_open(number):
            sightings = self.recorder.observations.sightings(number)
            entry = self.predictions.entry(number, family, func, args, kwargs, argument_storages, sightings)
        else:
            entry = Recognizer(number, func, sharing(argument_storages), family)
        if kind == OPERATOR and not entry.timed:
            run = measured(self, number, entry.op, func, (*args, *kwargs.values()), lambda: self.started)
            if run is not None:
                entry.timed, entry.op = True, run
        return entry

    def _begin_search(self) -> int:
        # the recorder may have cleared its tables since the last search
        first, generation = self.generations[0], self.recorder.generations.current
        # set this before any lookup, because another thread may start new tables at the same time
        self.generations = (first, None)
        if first != generation:
            self.predictions = CallPredictor()
            self.last = self.predictions.nowhere
            self.generations = (generation, None)
        began = perf_counter_ns()
        self.settle()
        # torch.distributed.autograd and compiled autograd run no node
        if not self._in_backward and backward_pass() >= 0:
            self._begin_backward()
        return began

    def _end_search(self, began: int) -> None:
        self.generations = (self.generations[0], self.recorder.generations.current)
        self._spent(began)

    def _spent(self, began: int) -> None:
        self.recorder.observations.set_aside(self.own_work.add(began))

    def _keep(
        self,
        node: CallNode,
        argument_storages: Storages,
        start: int,
        end: int,
        sequence: int,
        result: Any,
        raised: BaseException | None,
        shown: Callable[[Any], Any] | None = None,
    ) -> None:
        try:
            recorder = self.recorder
            if is_fake(type(result)):
                # a mode of the program made it without work; `running` must not take the call for one that runs
                recorder.lost.count_without_work(str(node.func), ON_FAKE)
                self.started = 0
                return
            if raised is not None and recorder.signatures.is_open(node.number) and is_from_program(raised):
                # otherwise the record would claim that all calls of the signature raise
                recorder.lost.count(recorder.signatures.open_name(node.number), interrupted_by(raised))
                return
            if shown is not None:
                result = shown(result)
            if type(result) is torch.ScriptObject and node.number in recorder.signatures.marks:
                self.labels.append((recorder.signatures.marks[node.number], hash(result)))
            if recorder.signatures.is_open(node.number):
                began = perf_counter_ns()
                recorder.signatures.close(node.number, result, raised)
                self._spent(began)
            result_storages = [self._storages.number(tensor) for tensor in tensors_in((result,))]
            pair = recorder.scopes.pair(node.number, node.scope, len(argument_storages) + len(result_storages))
            rows = self.rows
            rows += (pair, start, end, sequence, *argument_storages, *result_storages)
        except Exception as error:
            self.recorder.lost.drop(f"signature {node.number}", error)

    # the location

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
