"""Dry run of step replay, which determines how each call of a trace can run on the results of earlier calls."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from time import monotonic
from types import MappingProxyType
from typing import Any, TypeAlias
from weakref import WeakValueDictionary, finalize

import torch

from opgrip.cli.progress import REDRAW_S, ProgressCallback, ignore_progress
from opgrip.replay.cases.flow import FlowingCall, ProgramFlow, can_flow
from opgrip.replay.inputs.filling import memory_of
from opgrip.replay.inputs.inputs import DeviceMap, Inputs
from opgrip.replay.inputs.layouts import as_argument
from opgrip.replay.operators.agreement import check_agreement, checking_parts
from opgrip.replay.operators.agreement.indices import bounded_arguments
from opgrip.replay.operators.contexts import restored
from opgrip.replay.operators.devices import check_use, is_accelerator, synchronizer
from opgrip.replay.operators.lookup import (
    Operator,
    Unsupported,
    find_operator,
    overwrites,
    sizes_vary,
    takes_any_numbers,
)
from opgrip.replay.operators.memory import Arguments
from opgrip.replay.results.results import OK, SKIPPED
from opgrip.replay.run.workload import describe_failure
from opgrip.replay.sequences.call_timers import CallProgram, SequenceSettings, make_call_program
from opgrip.replay.sequences.step_memory import StepMemory, StreamPlan, Viewed, reason_of
from opgrip.replay.timing.rounds import NO_ROW, Announce
from opgrip.traces.schema.arguments import GeneratorSpec, TensorSpec, leaves, map_leaves
from opgrip.traces.schema.operator_arguments import Interface
from opgrip.traces.schema.python_objects import children
from opgrip.traces.schema.records import EXTENSION, NO_STORAGE, OPERATOR, Signature
from opgrip.traces.values import ValueModel
from opgrip.traces.values.boxes import MAX_COLUMNS, Boxes
from opgrip.traces.values.exact import Constant, Exact, OneHot
from opgrip.traces.values.floats import Floats, Probabilities
from opgrip.traces.values.progression import Progression

FAR = 1e3  # factor by which floats above 1 may exceed the recorded maximum


@dataclass(frozen=True, slots=True)
class _Flowing:
    index: int
    spec: TensorSpec


# function that creates a part of a call's arguments from the memory of its tensors
Filling: TypeAlias = Callable[[Viewed, tuple[int, ...]], Any]


class PreparedCall:
    """An operator with its arguments, some of which are taken from the results of earlier calls.

    generated : indices of the argument tensors that have their own memory, with values from value models
    """

    def __init__(
        self,
        signature: Signature,
        operator: Operator,
        generated: Collection[int],
        values: Mapping[int, ValueModel],
        place: DeviceMap,
        seed: int,
    ) -> None:
        check_agreement(operator.function, signature.args, signature.kwargs)
        self.function: Callable[..., Any] = operator.function
        count = 0

        def mark(leaf: Any) -> Any:
            nonlocal count
            if not isinstance(leaf, TensorSpec):
                return leaf
            count += 1
            return leaf if count - 1 in generated else _Flowing(count - 1, leaf)

        args, kwargs = map_leaves(mark, signature.args), map_leaves(mark, dict(signature.kwargs))
        self._inputs = Inputs(args, kwargs, values, place, seed)
        self._changes = bool(generated) and operator.mutates
        if self._changes:
            self._inputs.keep()
        generators = any(isinstance(leaf, GeneratorSpec) for leaf in leaves([args, kwargs]))
        same = None if generators or self._changes else self._inputs.make()
        # a Python function could change a list argument
        is_reused = signature.kind == OPERATOR
        self._positional = None if same is None else [_filling(value, is_reused) for value in same[0]]
        self._named = {} if same is None else {name: _filling(value, is_reused) for name, value in same[1].items()}

    def begin(self) -> None:
        if self._changes:
            self._inputs.restore()

    def arguments(self, memory: Viewed, storages: tuple[int, ...]) -> Arguments:
        """Return positional and keyword arguments; indices that the operator does not check are clamped to valid ones.

        storages : for each argument tensor, the number of the storage in `memory` that it uses
        """
        if self._positional is None:
            own_arguments = self._inputs.make()
            args, kwargs = _filled(own_arguments[0], memory, storages), _filled(own_arguments[1], memory, storages)
        else:
            args = tuple(fill(memory, storages) for fill in self._positional)
            kwargs = {name: fill(memory, storages) for name, fill in self._named.items()}
        return bounded_arguments(self.function, args, kwargs)


def _filling(value: Any, is_reused: bool) -> Filling:
    if type(value) is _Flowing:
        return lambda memory, storages: as_argument(memory.view(storages[value.index], value.spec), value.spec)
    if children(value) is None or (is_reused and not any(type(leaf) is _Flowing for leaf in leaves(value))):
        return lambda memory, storages: value
    return lambda memory, storages: _filled(value, memory, storages)


def _filled(tree: Any, memory: Viewed, storages: tuple[int, ...]) -> Any:
    def fill(leaf: Any) -> Any:
        if type(leaf) is not _Flowing:
            return leaf
        return as_argument(memory.view(storages[leaf.index], leaf.spec), leaf.spec)

    return map_leaves(fill, tree)


class GeneratedValues:
    """Decides whether a call can use the values that earlier calls left in memory, and replaces unusable ones."""

    def __init__(self, values: Mapping[int, ValueModel], place: DeviceMap, seed: int, memory: StepMemory) -> None:
        self._values, self._place, self._seed, self._memory = values, place, seed, memory
        self._tensors: dict[TensorSpec, torch.Tensor] = {}
        self._ranges: dict[TensorSpec, tuple[int, int]] = {}
        self.defers = False
        self._deferred: list[tuple[torch.Tensor, float]] = []

    def write(self, number: int, spec: TensorSpec) -> None:
        if not self._memory.holds(number, spec):
            self._memory.renew(number)
        target, drawn = self._memory.view(number, spec), self._tensor(spec)
        try:
            target.copy_(drawn)
        except RuntimeError:
            # elements share memory: copy all of it; the generated one has the same layout
            first, size = spec.offset * spec.dtype.itemsize, spec.extent
            to, since = memory_of(target.untyped_storage()), memory_of(drawn.untyped_storage())
            to[first:size].copy_(since[first:size])

    def allows_floats(self, spec: TensorSpec, tensor: torch.Tensor) -> bool:
        model = None if spec.values is None else self._values.get(spec.values)
        bound = None if model is None else _largest(model)
        if not spec.dtype.is_floating_point or 0 in spec.shape or bound is None:
            return True
        # one kernel, without copies of the tensor; 8-bit floats lack it
        wide = tensor if tensor.itemsize > 1 else tensor.float()
        largest = torch.linalg.vector_norm(wide, math.inf, dtype=None if wide.itemsize > 3 else torch.float32)
        limit = FAR * max(bound, 1.0)
        if self.defers and tensor.device.type != "cpu":
            self._deferred.append((largest, limit))
            return True
        return _is_within(float(largest), limit)

    def found_excess(self) -> bool:
        deferred, self._deferred = self._deferred, []
        if not deferred:
            return False
        device = deferred[0][0].device
        largest = torch.stack([tensor.to(device) for tensor, _ in deferred]).tolist()
        return not all(_is_within(value, limit) for value, (_, limit) in zip(largest, deferred, strict=True))

    def allows_indices(self, spec: TensorSpec, tensor: torch.Tensor) -> bool:
        """Return True unless a tensor has integers outside the recorded range; operators may use them as indices."""
        if spec.dtype.is_floating_point or spec.dtype.is_complex or spec.dtype is torch.bool or 0 in spec.shape:
            return True
        if spec not in self._ranges:
            self._ranges[spec] = _range(self._tensor(spec))
        low, high = self._ranges[spec]
        lowest, highest = _range(tensor)
        return low <= lowest and highest <= high

    def _tensor(self, spec: TensorSpec) -> torch.Tensor:
        if spec not in self._tensors:
            self._memory.charge(spec.extent)
            try:
                inputs = Inputs((replace(spec, cls=None),), {}, self._values, self._place, self._seed)
                self._tensors[spec] = inputs.make()[0][0]
            except BaseException:
                self._memory.refund(spec.extent)
                raise
        return self._tensors[spec]


def never_flowing(signature: Signature, specs: tuple[TensorSpec, ...], values: Mapping[int, ValueModel]) -> set[int]:
    if signature.kind != EXTENSION:
        return set()
    return {index for index, spec in enumerate(specs) if not (can_flow(spec) and _are_plain_floats(spec, values))}


def _are_plain_floats(spec: TensorSpec, values: Mapping[int, ValueModel]) -> bool:
    rows = len(spec.shape) == 2 and spec.shape[1] <= MAX_COLUMNS
    model = None if spec.values is None else values.get(spec.values)
    return spec.dtype.is_floating_point and isinstance(model, Floats) and not rows


def _is_within(largest: float, limit: float) -> bool:
    return math.isfinite(largest) and largest <= limit


def _largest(model: ValueModel) -> float | None:
    match model:
        case Floats(nan=0, inf=0, minus_inf=0) | Boxes():
            bounds = [model.low, model.high] if isinstance(model, Floats) else [*model.low, *model.high]
        case Exact():
            bounds = [value for value in model.data if isinstance(value, int | float)]
        case Constant(value) if isinstance(value, int | float):
            bounds = [value]
        case Progression():
            bounds = [model.start, model.start + model.step * (model.period - 1)]
        case OneHot() | Probabilities():
            bounds = [1]
        case _:
            return None
    return max(map(abs, bounds)) if bounds and all(map(math.isfinite, bounds)) else None


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    low, high = torch.aminmax(tensor)
    return int(low), int(high)


REPLAYED, SUBSTITUTED, UNSUPPORTED = "replayed", "substituted", "unsupported"
OTHER_SHAPES = "its results have other shapes than the recorded ones"
MOST_PASSES = 10
# row status and reason of calls that must not run, by signature number
Excluded: TypeAlias = Mapping[int, tuple[str, str]]
NOTHING_EXCLUDED: Excluded = MappingProxyType({})
NO_TENSORS = Interface((), ())


@dataclass(slots=True)
class CallPlan:
    """How one call runs.

    status : `replayed` on results of earlier calls, `substituted` on generated arguments, or `unsupported` if it does
        not run
    refilled : indices of the argument tensors that are filled with new values before each run
    """

    status: str = REPLAYED
    prepared: PreparedCall | None = None
    refilled: set[int] = field(default_factory=set)
    reason: str = ""
    row_status: str = OK


class DryRun:
    """A dry run over the calls of a trace, and the plan for each call that results from it.

    excluded : status and reason of calls that must not run, by signature number
    announce : called with the signature number before each call
    has_others : True if other ranks run their part of the step at the same time
    """

    has_others, is_first, processes = False, True, 1

    def __init__(
        self,
        flow: ProgramFlow,
        memory: StepMemory,
        values: Mapping[int, ValueModel],
        settings: SequenceSettings,
        excluded: Excluded = NOTHING_EXCLUDED,
        announce: Announce = lambda number, row: None,
    ) -> None:
        self.flow = flow
        self.memory = memory
        self.announce = announce
        self.plans = [CallPlan() for _ in flow.calls]
        self.programs: dict[int, CallProgram] = {}
        self.streams: StreamPlan | None = None
        self._values, self._settings, self._excluded = values, settings, excluded
        self._device = settings.device
        self._synchronize = synchronizer(settings.device)
        self._generated = GeneratedValues(values, settings.place, settings.seed, memory)
        # reading a number of each tensor would take most of a pass
        self._generated.defers = is_accelerator(settings.device)
        self._operators: dict[int, Operator | str] = {}
        self._prepared: WeakValueDictionary[tuple[int, frozenset[int]], PreparedCall] = WeakValueDictionary()

    def settle(self, begin: Callable[[], None], on_progress: ProgressCallback = ignore_progress) -> None:
        """Find out how each call can run, by running all; `begin` restores the state before each run."""
        count, reported = len(self.plans), monotonic()
        for number in range(1, MOST_PASSES + 1):
            begin()
            with switching() as use:
                changed = False
                for index, (call, plan) in enumerate(zip(self.flow.calls, self.plans, strict=True)):
                    if monotonic() - reported > REDRAW_S:
                        on_progress(f"dry run {number}", index, count)
                        reported = monotonic()
                    use(call.settings)
                    changed |= self._try(call, plan)
            self.finish()
            if self._generated.found_excess():
                # later calls ran on these floats: find out again how each call can run, with immediate checks
                self._generated.defers, changed = False, True
                self.plans[:] = [CallPlan() for _ in self.plans]
            if not self.most(changed)[0]:
                break
        self.memory.forget_constants()

    def make_programs(self, on_progress: ProgressCallback = ignore_progress) -> None:
        first = {call.signature: call for call, plan in zip(self.flow.calls, self.plans, strict=True) if plan.prepared}
        remaining = [call for number, call in first.items() if number not in self.programs]
        for number, call in enumerate(remaining):
            on_progress("compiling", number, len(remaining))
            self.announce(call.signature, NO_ROW)
            record = self.flow.signatures[call.signature]
            inputs = Inputs(record.args, record.kwargs, self._values, self._settings.place, self._settings.seed)
            operator = self._operator(call.signature)
            self.programs[call.signature] = make_call_program(call, operator, inputs, self._settings)

    def most(self, *numbers: int) -> list[int]:
        """Return the largest value of each number over all ranks; without other ranks, the numbers themselves."""
        return list(numbers)

    def begins_pass(self, more: bool, begin: Callable[[], None]) -> bool:
        """Restore the state before the first call if the step runs again, and return True in that case."""
        if more:
            begin()
        return more

    def meets_others(self, call: FlowingCall, plan: CallPlan) -> bool:
        """Run the call if other ranks take part in it, and return True in that case."""
        return False

    def finish(self) -> None: ...

    def begin(self) -> None:
        self.memory.begin()
        for prepared in self._prepared.values():
            prepared.begin()

    def refill(self, call: FlowingCall, plan: CallPlan) -> None:
        specs = self._interface(call).inputs
        for index in plan.refilled:
            self._generated.write(call.inputs[index], specs[index])

    def pass_on_results(self, call: FlowingCall, plan: CallPlan, result: Any) -> None:
        live = self.memory.live
        if plan.status == REPLAYED:
            for number, tensor in zip(call.outputs, tensors_of(result), strict=False):
                if number not in live and number != NO_STORAGE:
                    self.memory.give(number, tensor.untyped_storage())
            return
        for number in call.outputs:
            need = self.flow.needs.get(number)
            if number not in live and number not in self.memory.unmade and need is not None and need.views:
                try:
                    self.memory.renew(number)
                except Exception as error:
                    check_use(self._device, error)
                    # later calls that take this result report this reason
                    self.memory.unmade[number] = reason_of(error)

    def mark_not_replayed(self, call: FlowingCall, plan: CallPlan, reason: str) -> None:
        plan.refilled = set()
        try:
            if plan.status != REPLAYED:
                raise Unsupported(reason)
            # release the arguments of the plan that failed before preparing others
            plan.status, plan.prepared, plan.reason = SUBSTITUTED, None, reason
            plan.prepared = self._prepare(call.signature, frozenset(range(len(self._interface(call).inputs))))
            self._run(call, plan.prepared)
        except Exception as error:
            check_use(self._device, error)
            plan.status, plan.prepared, plan.reason = UNSUPPORTED, None, reason_of(error)
            plan.row_status = self._row_status(call.signature, error)

    def _try(self, call: FlowingCall, plan: CallPlan) -> bool:
        before = plan.status, len(plan.refilled)
        result = None
        try:
            if plan.status == REPLAYED:
                plan.prepared = self._arrange(call, plan)
                self.memory.check_room(sum(spec.extent for spec in self._interface(call).outputs))
                result = self._run_with_recorded_shapes(call, plan, plan.prepared)
            elif plan.prepared is not None:
                self._run(call, plan.prepared)
        except Exception as error:
            check_use(self._device, error)
            self.mark_not_replayed(call, plan, reason_of(error))
        try:
            self.pass_on_results(call, plan, result)
        except Exception as error:
            check_use(self._device, error)
            # results without a storage, such as sparse ones, cannot be passed on
            self.mark_not_replayed(call, plan, reason_of(error))
            self.pass_on_results(call, plan, None)
        self.memory.drop(call.over)
        return before != (plan.status, len(plan.refilled))

    def _run_with_recorded_shapes(self, call: FlowingCall, plan: CallPlan, prepared: PreparedCall) -> Any:
        flowing = [index for index, number in enumerate(call.inputs) if number != NO_STORAGE]
        specs = self._interface(call).inputs
        masks = {index for index in flowing if specs[index].dtype is torch.bool}
        integers = {index for index in flowing if not specs[index].dtype.is_floating_point}
        # generate masks first, then all integers, because these can determine shapes
        for deciding in (masks, integers, None):
            try:
                self.refill(call, plan)
                result = self._run(call, prepared)
                if not self._has_recorded_shapes(call, prepared, result):
                    raise Unsupported(OTHER_SHAPES)
                return result
            except Exception:
                if deciding is None or integers <= plan.refilled:
                    raise
            plan.refilled |= deciding
        raise AssertionError("internal error: the last attempt neither returned nor raised")

    def _run(self, call: FlowingCall, prepared: PreparedCall) -> Any:
        args, kwargs = prepared.arguments(self.memory, call.inputs)
        self.announce(call.signature, NO_ROW)
        with checking_parts(prepared.function):
            result = prepared.function(*args, **kwargs)
        # an error that the device reports only now must not be blamed on the next call
        self._synchronize()
        return result

    def _arrange(self, call: FlowingCall, plan: CallPlan) -> PreparedCall:
        memory, interface = self.memory, self._interface(call)
        tensors = list(enumerate(zip(call.inputs, interface.inputs, strict=True)))
        own = frozenset(index for index, (number, spec) in tensors if number == NO_STORAGE or not can_flow(spec))
        prepared = self._prepare(call.signature, own)
        never = never_flowing(self.flow.signatures[call.signature], interface.inputs, self._values)
        any_integers = takes_any_numbers(prepared.function, self._device)
        for index, (number, spec) in tensors:
            if index in own or index in plan.refilled:
                continue
            if number in memory.unmade:
                raise Unsupported(memory.unmade[number])
            if index in never or not memory.holds(number, spec):
                plan.refilled.add(index)
                continue
            if index == 0 and overwrites(prepared.function):
                continue
            tensor = memory.view(number, spec)
            integers_allowed = any_integers or self._generated.allows_indices(spec, tensor)
            if not (integers_allowed and self._generated.allows_floats(spec, tensor)):
                plan.refilled.add(index)
        return prepared

    def _prepare(self, signature: int, own: frozenset[int]) -> PreparedCall:
        key = signature, own
        prepared = self._prepared.get(key)
        if prepared is not None:
            return prepared
        operator = self._operator(signature)
        specs = self.flow.interfaces[signature].inputs
        size = sum(specs[index].extent for index in own) * (2 if operator.mutates else 1)
        self.memory.charge(size)
        record = self.flow.signatures[signature]
        try:
            prepared = PreparedCall(record, operator, own, self._values, self._settings.place, self._settings.seed)
        except BaseException:
            self.memory.refund(size)
            raise
        # the memory is refunded when the last plan that uses `prepared` is released
        finalize(prepared, self.memory.refund, size).atexit = False
        self._prepared[key] = prepared
        return prepared

    def _operator(self, signature: int) -> Operator:
        if signature not in self._operators:
            try:
                self._operators[signature] = self._find(signature)
            except Unsupported as error:
                self._operators[signature] = str(error)
        operator = self._operators[signature]
        if isinstance(operator, str):
            raise Unsupported(operator)
        return operator

    def _find(self, signature: int) -> Operator:
        if signature in self._excluded:
            raise Unsupported(self._excluded[signature][1])
        record = self.flow.signatures.get(signature)
        if record is None:
            raise Unsupported("the trace does not contain its signature")
        if record.raised is not None:
            raise Unsupported(f"it raised when it was captured: {record.raised[:120]}")
        return find_operator(record, self._settings.extensions)

    def _row_status(self, signature: int, error: Exception) -> str:
        if signature in self._excluded:
            return self._excluded[signature][0]
        record = self.flow.signatures.get(signature)
        return SKIPPED if record is not None and record.raised is not None else describe_failure(error)[0]

    def _has_recorded_shapes(self, call: FlowingCall, prepared: PreparedCall, result: Any) -> bool:
        result_tensors = tensors_of(result)
        if not call.outputs:
            return True
        if len(result_tensors) != len(call.outputs):
            return False
        recorded = self._interface(call).outputs
        varies = sizes_vary(prepared.function)
        for index, (number, tensor) in enumerate(zip(call.outputs, result_tensors, strict=True)):
            specs = [recorded[index]] if len(recorded) == len(result_tensors) else []
            need = self.flow.needs.get(number)
            if number not in self.memory.live and need is not None and need.views:
                # a signature holds only the results of its first call
                specs = [need.views[0]] if varies else [*specs, need.views[0]]
                if tensor.untyped_storage().nbytes() < need.views[0].extent:
                    return False
            if specs and (tuple(tensor.shape), tensor.dtype) not in [(spec.shape, spec.dtype) for spec in specs]:
                return False
        return True

    def _interface(self, call: FlowingCall) -> Interface:
        return self.flow.interfaces.get(call.signature, NO_TENSORS)


@contextmanager
def switching() -> Iterator[Callable[[Mapping[str, Any]], None]]:
    current: Mapping[str, Any] | None = None
    with torch.no_grad(), ExitStack() as stack:

        def use(settings: Mapping[str, Any]) -> None:
            nonlocal current
            if settings is not current:
                stack.close()
                current = None
                stack.enter_context(restored(settings))
                current = settings

        yield use


def tensors_of(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    return [leaf for leaf in leaves(result) if isinstance(leaf, torch.Tensor)]
