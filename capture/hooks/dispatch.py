"""The dispatch mode: sees every operator that the dispatcher runs in its thread, below autograd and autocast.

What `__torch_dispatch__` does is done for every call of a program, so it is written for speed:
`benchmarks/capture_overhead.py` measures it, docs/capture.md tells what each part costs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from threading import enumerate as enumerate_threads
from threading import get_ident
from time import perf_counter_ns
from types import FunctionType
from typing import Any, cast

import torch
from torch import is_grad_enabled, is_inference_mode_enabled

from opgrip.capture.hooks.higher_order import higher_order_node
from opgrip.capture.hooks.placed_mode import UNPAIRED, PlacedMode
from opgrip.capture.program.contexts import read_settings
from opgrip.capture.recording.inner_times import measured
from opgrip.capture.recording.looks import look_at
from opgrip.capture.recording.recorder import Recorder
from opgrip.capture.recording.storages import SWEEP, SWEEP_BYTES
from opgrip.capture.signatures.predictions import CAREFUL, LISTED, ONE, SEVERAL, TWO, Entry, Node, Predictions, sharing
from opgrip.capture.signatures.signatures import tensors_in
from opgrip.capture.timing.device_time import DeviceTimer
from opgrip.capture.timing.kernels import identities_here
from opgrip.capture.timing.own_work import OwnWork
from opgrip.capture.timing.page_faults import FaultCounter
from opgrip.capture.torch_compat.compiler_private import hide_from_compiler
from opgrip.capture.torch_compat.higher_order_private import is_higher_order, see_higher_order
from opgrip.capture.torch_compat.torch_private import (
    current_autograd_node,
    is_made_of_tensors,
    pin,
    sequence_number,
    storage_address,
    unpin,
)
from opgrip.errors import interrupted_by, is_from_program
from opgrip.traces.schema.records import FUNCTION, OPERATOR

PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
NOTHING: Mapping[str, Any] = {}

Storages = tuple[int, ...]


class RecordingMode(PlacedMode):
    """Records the calls of one thread, and runs every one as it was called.

    Attributes
    ----------
    last, started : of the operator call that was entered last: its node, its start in ns
    """

    supports_higher_order_operators = True

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(recorder)
        see_higher_order(type(self))
        # a thread's ident goes to another thread when it ends
        self.number = recorder.next_mode()
        self.idle = recorder.idle
        self._ahead = recorder.write_ahead
        self._around: list[tuple[int, Node]] = []
        self.begin()

    def begin(self) -> None:
        self.ident = get_ident()
        self.idents = identities_here()
        # the engine's own threads are not Python's
        names = (thread.name for thread in enumerate_threads() if thread.ident == self.ident)
        self.thread_name = next(names, "autograd")
        self.rows: list[int] = []
        self.started = 0
        self.first_sequence = sequence_number()
        self._pinned_bytes = 0
        self.device = DeviceTimer()
        self.faults = FaultCounter()
        self.own_work = OwnWork()
        self.predictions = Predictions()
        self.last: Node = self.predictions.nowhere
        self.epochs = (self.recorder.epochs.current, None)
        self._settings = read_settings()
        self._storages = self.recorder.storages
        self._numbers = self._storages.numbers
        self._new_number = self._storages.new_number
        self._young = self._storages.young

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # whether torch is to wrap the handler in its guard
        return not cls._hidden

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Record and run one operator."""
        if self.idle or (types and not PLAIN.issuperset(types)):
            return self._pass_by(func, types, args, kwargs or {})
        autograd_node = current_autograd_node()
        if autograd_node is not None and get_ident() != self.ident:
            # the engine's threads inherit the mode of the thread that the forward pass ran in
            return self.recorder.mode_of_engine().__torch_dispatch__(func, types, args, kwargs)
        node: Node | None = None
        argument_storages: Storages | None = None
        try:
            grad = is_grad_enabled()
            if autograd_node is None:
                if self._in_backward:
                    self._leave_backward()
                # without gradients, no node is made
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
            self.recorder.drop(str(func), error)
            node = None
        if node is None or argument_storages is None:
            return func(*args, **(kwargs or {}))
        self.started = start = perf_counter_ns()
        if self._ahead:
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
                            self._pinned_bytes += storage.nbytes()
                            if len(self._young) > SWEEP or self._pinned_bytes > SWEEP_BYTES:
                                self._sweep()
                    result_storage = numbers[address]
                # adding and returning is all one for what interrupts the program: the call is there, or it is lost
                rows = self.rows
                rows += (node.pair, start, end, sequence, *argument_storages, result_storage)
            else:
                self._keep(node, argument_storages, start, end, sequence, result, None)
        except BaseException as error:
            if isinstance(error, NotImplementedError) and not is_from_program(error):
                # a sparse result has no memory of its own
                node.layout = CAREFUL
                self._keep(node, argument_storages, start, end, sequence, result, None)
            else:
                self.recorder.lose(str(func), error)
        return result

    _hidden = hide_from_compiler(cast(FunctionType, __torch_dispatch__))

    def call(
        self,
        name: str,
        kind: str,
        run: Callable[[], Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        shown: Callable[[Any], Any] | None = None,
    ) -> Any:
        if self.idle:
            return run()
        depth, around, node = self.depth(), len(self._around), None
        start = sequence = 0
        argument_storages: Storages = ()
        try:
            began = self._begin_search()
            self.settle()
            # what has just been settled is left
            depth = self.depth()
            autograd_node = current_autograd_node()
            sequence = sequence_number() if autograd_node is None else self._enter_backward(autograd_node)
            argument_storages = self.storages_in(args, kwargs)
            entry = self._by_key(name, kind, args, kwargs, argument_storages)
            scope, pair = self.recorder.scopes.point(entry.number, self.place, len(argument_storages) + 1)
            node = Node(entry, (), scope, pair, None)
            self.enter(node, self.recorder.places.inside(self.place, name, kind == FUNCTION))
            # the device time of a function of the program is that of the calls in it
            values, on_device = (*args, *kwargs.values()), kind != FUNCTION
            run = measured(self.recorder, self, entry.number, run, None, values, lambda: start, on_device) or run
            # a compiled region frees its inputs as it goes
            del args, kwargs, values
            self._end_search(began)
        except BaseException as error:
            self.leave_to(depth)
            self.recorder.drop(name, error)
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
                self.recorder.lose(name, error)
            # else the error would hold this frame, which holds the error
            raised = None
        return result

    def running(self, last_start: int, last_end: int) -> list[tuple[int, Node]]:
        running = list(self._around)
        started, current = self.started, self.last
        # of a call that is over, the row is still here, or it was taken, or it ended before one that was
        if not self.rows and started != last_start and started >= last_end and current.pair >= 0:
            running.append((started, current))
        return running

    def look_at_settings(self) -> None:
        settings = read_settings()
        if settings != self._settings:
            self._settings = settings
            self.predictions.forget_nodes()
            self.last = self.predictions.nowhere

    def look_at(self, signature: int) -> None:
        for node in self.predictions.nodes_of(signature):
            look_at(node, self)

    def _pass_by(self, func: Any, types: Sequence[type], args: Any, kwargs: Any) -> Any:
        if self.idle:
            return func(*args, **kwargs)
        self.recorder.pass_by(str(func), types)
        if all(kind in PLAIN or is_made_of_tensors(kind) for kind in types):
            # it calls others, which come here
            return NotImplemented
        # such as those that stand for tensors while a program is traced
        return func(*args, **kwargs)

    def _match_storages(self, node: Node, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Storages | None:
        """The storages of a call's tensors; None where they share memory in another way than the node's."""
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

    def storages_in(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Storages:
        return tuple([self._storages.number(tensor) for tensor in tensors_in((*args, *kwargs.values()))])

    def _find(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Node, Storages]:
        """The node of a call that was not foreseen."""
        began = self._begin_search()
        self.settle()
        argument_storages = self.storages_in(args, kwargs)
        pattern = sharing(argument_storages)
        node = self.predictions.successor(self.last, func, args, kwargs, pattern)
        if node is not None:
            self._end_search(began)
            return node, argument_storages
        if is_higher_order(func):
            outer = higher_order_node(self.recorder, self, func, args, kwargs, len(argument_storages))
            if outer is not None:
                self._end_search(began)
                return outer, argument_storages
        entry = self.predictions.recent(func, args, kwargs, pattern)
        if entry is None:
            entry = self._by_key(func, OPERATOR, args, kwargs, argument_storages)
        place, number = self.place, entry.number
        point = lambda: self.recorder.scopes.point(number, place, len(argument_storages) + 1)  # noqa: E731
        modes = is_grad_enabled(), is_inference_mode_enabled()
        node = self.predictions.node(self.last, place, entry, modes, point)
        if self.recorder.observations.is_due(number) and not self.recorder.is_open(number):
            look_at(node, self)
        self._end_search(began)
        return node, argument_storages

    def _by_key(self, func: Any, kind: str, args: Any, kwargs: Any, argument_storages: Storages) -> Entry:
        number = self.recorder.signature(func, kind, args, kwargs)
        family = self.recorder.families[number]
        if kind == OPERATOR and not self.recorder.is_open(number):
            sightings = self.recorder.observations.sightings(number)
            entry = self.predictions.entry(number, family, func, args, kwargs, argument_storages, sightings)
        else:
            entry = Entry(number, func, sharing(argument_storages), family)
        if kind == OPERATOR and not entry.timed:
            run = measured(self.recorder, self, number, entry.op, func, (*args, *kwargs.values()), lambda: self.started)
            if run is not None:
                entry.timed, entry.op = True, run
        return entry

    def _begin_search(self) -> int:
        """Go on with the recorder's tables, which may have begun anew; the time in ns."""
        first, epoch = self.epochs[0], self.recorder.epochs.current
        # before anything is looked up: another thread may begin them anew meanwhile
        self.epochs = (first, None)
        if first != epoch:
            self.predictions = Predictions()
            self.last = self.predictions.nowhere
            self.epochs = (epoch, None)
        return perf_counter_ns()

    def _end_search(self, began: int) -> None:
        self.epochs = (self.epochs[0], self.recorder.epochs.current)
        self._spent(began)

    def _sweep(self) -> None:
        began, self._pinned_bytes = perf_counter_ns(), 0
        self._storages.sweep()
        self._spent(began)

    def _spent(self, began: int) -> None:
        """Take note of own work that ends now, which is no time of the program."""
        self.recorder.observations.set_aside(self.own_work.add(began))

    def _keep(
        self,
        node: Node,
        argument_storages: Storages,
        start: int,
        end: int,
        sequence: int,
        result: Any,
        raised: BaseException | None,
        shown: Callable[[Any], Any] | None = None,
    ) -> None:
        """Record a call that has ended."""
        try:
            recorder = self.recorder
            if raised is not None and recorder.is_open(node.number) and is_from_program(raised):
                # it would say of all calls of the signature that they raise
                recorder.count_lost(recorder.name_of(node.number), interrupted_by(raised))
                return
            if shown is not None:
                result = shown(result)
            if recorder.is_open(node.number):
                began = perf_counter_ns()
                recorder.close_signature(node.number, result, raised)
                self._spent(began)
            result_storages = [self._storages.number(tensor) for tensor in tensors_in((result,))]
            pair = recorder.scopes.pair(node.number, node.scope, len(argument_storages) + len(result_storages))
            rows = self.rows
            rows += (pair, start, end, sequence, *argument_storages, *result_storages)
        except Exception as error:
            self.recorder.drop(f"signature {node.number}", error)
