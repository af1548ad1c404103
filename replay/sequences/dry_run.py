"""Finds out which calls of a trace can run on what the calls before them made, by running them all."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from time import monotonic
from types import MappingProxyType
from typing import Any, TypeAlias
from weakref import WeakValueDictionary, finalize

import torch

from opgrip.cli.progress import REDRAW_S, Tell, tell_nobody
from opgrip.replay.cases.flow import Flow, FlowingCall, can_flow
from opgrip.replay.inputs.inputs import DeviceMap, Inputs
from opgrip.replay.operators.agreement.checking import checking_parts
from opgrip.replay.operators.contexts import restored
from opgrip.replay.operators.devices import check_use, synchronizer
from opgrip.replay.operators.lookup import Operator, Unsupported, find_operator
from opgrip.replay.operators.traits import overwrites, sizes_vary, takes_any_numbers
from opgrip.replay.results.results import OK, SKIPPED
from opgrip.replay.run.failures import describe_failure
from opgrip.replay.sequences.prepared_calls import DrawnValues, PreparedCall, never_flowing
from opgrip.replay.sequences.step_memory import StepMemory, reason_of
from opgrip.replay.sequences.step_programs import CallProgram, ModeSettings, make_call_program
from opgrip.replay.timing.rounds import NO_ROW, Announce
from opgrip.traces.schema.arguments import leaves
from opgrip.traces.schema.operator_arguments import Interface
from opgrip.traces.schema.records import NO_STORAGE
from opgrip.traces.values import ValueModel

REPLAYED, SUBSTITUTED, UNSUPPORTED = "replayed", "substituted", "unsupported"
OTHER_SHAPES = "its results have other shapes than the recorded ones"
MOST_PASSES = 10
Excluded: TypeAlias = Mapping[int, tuple[str, str]]
"""Calls that are not run, by the numbers of their signatures: the status of their rows, and why."""
NOTHING_EXCLUDED: Excluded = MappingProxyType({})
NOTHING = Interface((), ())


@dataclass(slots=True)
class CallPlan:
    """How one call is run.

    Attributes
    ----------
    status : `replayed` on memory that flows; `substituted` on drawn arguments, with other results in the place of its
        own; `unsupported` not at all, with results in that place
    redrawn : which of its tensors get drawn values before it runs
    reason : of a status other than `replayed`
    row_status : of the row of such calls, where they do not run at all
    """

    status: str = REPLAYED
    prepared: PreparedCall | None = None
    redrawn: set[int] = field(default_factory=set)
    reason: str = ""
    row_status: str = OK


class DryRun:
    """The calls of a trace, each with the way in which it can run.

    Parameters
    ----------
    excluded : by the numbers of signatures, the status of their rows, and why their calls are not run
    announce : is told the signature of each call before it runs

    Attributes
    ----------
    parts : of each call
    programs : what calls run as under another mode than eager, by the numbers of their signatures
    """

    def __init__(
        self,
        flow: Flow,
        memory: StepMemory,
        values: Mapping[int, ValueModel],
        place: DeviceMap,
        device: str,
        seed: int,
        extensions: Collection[str],
        excluded: Excluded,
        announce: Announce,
    ) -> None:
        self.flow = flow
        self.memory = memory
        self.announce = announce
        self.programs: dict[int, CallProgram] = {}
        self._excluded = excluded
        self.parts = [CallPlan() for _ in flow.calls]
        self._values, self._place, self._seed, self._extensions = values, place, seed, extensions
        self._device = device
        self._synchronize = synchronizer(device)
        self._drawn = DrawnValues(values, place, seed, memory)
        self._operators: dict[int, Operator | str] = {}
        self._prepared: WeakValueDictionary[tuple[int, frozenset[int]], PreparedCall] = WeakValueDictionary()

    def settle(self, begin: Callable[[], None], tell: Tell = tell_nobody) -> None:
        """Run all calls until each runs as it did the time before.

        Parameters
        ----------
        begin : puts everything back to how it is before the first call
        tell : is told how far it is
        """
        count, told = len(self.parts), monotonic()
        for number in range(1, MOST_PASSES + 1):
            begin()
            with switching() as use:
                changed = False
                for place, (call, part) in enumerate(zip(self.flow.calls, self.parts, strict=True)):
                    if monotonic() - told > REDRAW_S:
                        tell(f"dry run {number}", place, count)
                        told = monotonic()
                    use(call.settings)
                    changed |= self._try(call, part)
            if not self._is_unsettled(changed):
                break
        self.memory.forget_constants()

    def make_programs(self, settings: ModeSettings, tell: Tell = tell_nobody) -> None:
        """Make what calls run as under a mode."""
        first = {call.signature: call for call, part in zip(self.flow.calls, self.parts, strict=True) if part.prepared}
        remaining = [call for number, call in first.items() if number not in self.programs]
        for number, call in enumerate(remaining):
            tell("compiling", number, len(remaining))
            self.announce(call.signature, NO_ROW)
            record = self.flow.signatures[call.signature]
            inputs = Inputs(record.args, record.kwargs, self._values, self._place, self._seed)
            self.programs[call.signature] = make_call_program(call, self._operator(call.signature), inputs, settings)

    def begin(self) -> None:
        """Put all memory back to how it was before the first call."""
        self.memory.begin()
        for prepared in self._prepared.values():
            prepared.begin()

    def redraw(self, call: FlowingCall, part: CallPlan) -> None:
        """Draw the values anew that a call cannot take as they come."""
        specs = self._interface(call).takes
        for index in part.redrawn:
            self._drawn.write(call.takes[index], specs[index])

    def hand_on(self, call: FlowingCall, part: CallPlan, result: Any) -> None:
        """Let the results of a call be what later calls take.

        Never raises for a call that is not `replayed`: what there is no memory for is `unmade`.
        """
        live = self.memory.live
        if part.status == REPLAYED:
            for number, tensor in zip(call.gives, tensors_of(result), strict=False):
                if number not in live and number != NO_STORAGE:
                    self.memory.give(number, tensor.untyped_storage())
            return
        for number in call.gives:
            need = self.flow.needs.get(number)
            if number not in live and number not in self.memory.unmade and need is not None and need.views:
                try:
                    self.memory.renew(number)
                except Exception as error:
                    check_use(self._device, error)
                    # the reason of those that take it; this call ran as well as it could
                    self.memory.unmade[number] = reason_of(error)

    def give_up(self, call: FlowingCall, part: CallPlan, reason: str) -> None:
        """Run a call from now on with arguments of its own, or not at all where it cannot run with those either."""
        part.redrawn = set()
        try:
            if part.status != REPLAYED:
                raise Unsupported(reason)
            # what it had drawn is of use to no other way to run
            part.status, part.prepared, part.reason = SUBSTITUTED, None, reason
            everything = frozenset(range(len(self._interface(call).takes)))
            part.prepared = self._prepare(call.signature, everything)
            self._run(call, part.prepared)
        except Exception as error:
            check_use(self._device, error)
            part.status, part.prepared, part.reason = UNSUPPORTED, None, reason_of(error)
            part.row_status = self._row_status(call.signature, error)

    def _is_unsettled(self, changed: bool) -> bool:
        """Whether another pass is due after one in which some call came to run otherwise, or none did."""
        return changed

    def _try(self, call: FlowingCall, part: CallPlan) -> bool:
        """Run a call; whether it will run otherwise from now on."""
        before = part.status, len(part.redrawn)
        result = None
        try:
            if part.status == REPLAYED:
                part.prepared = self._arrange(call, part)
                self.memory.check_room(sum(spec.extent for spec in self._interface(call).gives))
                result = self._fitting(call, part, part.prepared)
            elif part.prepared is not None:
                self._run(call, part.prepared)
        except Exception as error:
            check_use(self._device, error)
            self.give_up(call, part, reason_of(error))
        try:
            self.hand_on(call, part, result)
        except Exception as error:
            check_use(self._device, error)
            # results that live in no memory, which cannot flow
            self.give_up(call, part, reason_of(error))
            self.hand_on(call, part, None)
        self.memory.drop(call.over)
        return before != (part.status, len(part.redrawn))

    def _fitting(self, call: FlowingCall, part: CallPlan, prepared: PreparedCall) -> Any:
        """Results of the recorded form, if need be with masks drawn anew, and then indices: they decide on shapes."""
        flowing = [index for index, number in enumerate(call.takes) if number != NO_STORAGE]
        specs = self._interface(call).takes
        masks = {index for index in flowing if specs[index].dtype is torch.bool}
        whole = {index for index in flowing if not specs[index].dtype.is_floating_point}
        for deciding in (masks, whole):
            try:
                return self._fitted(call, part, prepared)
            except Exception:
                if whole <= part.redrawn:
                    raise
            part.redrawn |= deciding
        return self._fitted(call, part, prepared)

    def _fitted(self, call: FlowingCall, part: CallPlan, prepared: PreparedCall) -> Any:
        self.redraw(call, part)
        result = self._run(call, prepared)
        if not self._fits(call, prepared, result):
            raise Unsupported(OTHER_SHAPES)
        return result

    def _run(self, call: FlowingCall, prepared: PreparedCall) -> Any:
        args, kwargs = prepared.arguments(self.memory, call.takes)
        self.announce(call.signature, NO_ROW)
        with checking_parts(prepared.function):
            result = prepared.function(*args, **kwargs)
        # what a device says of it only now is not the next call's
        self._synchronize()
        return result

    def _arrange(self, call: FlowingCall, part: CallPlan) -> PreparedCall:
        """The call with memory that flows, and in its part what has to be drawn."""
        memory, interface = self.memory, self._interface(call)
        places = list(enumerate(zip(call.takes, interface.takes, strict=True)))
        own = frozenset(index for index, (number, spec) in places if number == NO_STORAGE or not can_flow(spec))
        prepared = self._prepare(call.signature, own)
        never = never_flowing(self.flow.signatures[call.signature], interface.takes, self._values)
        anything = takes_any_numbers(prepared.function, self._device)
        for index, (number, spec) in places:
            if index in own or index in part.redrawn:
                continue
            if number in memory.unmade:
                raise Unsupported(memory.unmade[number])
            if index in never or not memory.holds(number, spec):
                part.redrawn.add(index)
            if index in part.redrawn or (index == 0 and overwrites(prepared.function)):
                continue
            tensor = memory.view(number, spec)
            indices_allowed = anything or self._drawn.allows_indices(spec, tensor)
            if not (indices_allowed and self._drawn.allows_floats(spec, tensor)):
                part.redrawn.add(index)
        return prepared

    def _prepare(self, signature: int, own: frozenset[int]) -> PreparedCall:
        key = signature, own
        prepared = self._prepared.get(key)
        if prepared is not None:
            return prepared
        operator = self._operator(signature)
        specs = self.flow.interfaces[signature].takes
        size = sum(specs[index].extent for index in own) * (2 if operator.mutates else 1)
        self.memory.charge(size)
        record = self.flow.signatures[signature]
        try:
            prepared = PreparedCall(record, operator, own, self._values, self._place, self._seed)
        except BaseException:
            self.memory.refund(size)
            raise
        # it goes with the last part that runs so
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
            raise Unsupported("the trace does not hold its signature")
        if record.raised is not None:
            raise Unsupported(f"it raised when it was captured: {record.raised[:120]}")
        return find_operator(record, self._extensions)

    def _row_status(self, signature: int, error: Exception) -> str:
        """What other replays say of a call that raised this."""
        if signature in self._excluded:
            return self._excluded[signature][0]
        record = self.flow.signatures.get(signature)
        return SKIPPED if record is not None and record.raised is not None else describe_failure(error)[0]

    def _fits(self, call: FlowingCall, prepared: PreparedCall, result: Any) -> bool:
        """Whether results are as recorded, or as the first call that takes them does."""
        result_tensors = tensors_of(result)
        if not call.gives:
            return True
        if len(result_tensors) != len(call.gives):
            return False
        recorded = self._interface(call).gives
        varies = sizes_vary(prepared.function)
        for index, (number, tensor) in enumerate(zip(call.gives, result_tensors, strict=True)):
            specs = [recorded[index]] if len(recorded) == len(result_tensors) else []
            need = self.flow.needs.get(number)
            if number not in self.memory.live and need is not None and need.views:
                # what a signature tells of results is of its first call
                specs = [need.views[0]] if varies else [*specs, need.views[0]]
                if tensor.untyped_storage().nbytes() < need.views[0].extent:
                    return False
            if specs and (tuple(tensor.shape), tensor.dtype) not in [(spec.shape, spec.dtype) for spec in specs]:
                return False
        return True

    def _interface(self, call: FlowingCall) -> Interface:
        return self.flow.interfaces.get(call.signature, NOTHING)


@contextmanager
def switching() -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Gives what goes over to a call's settings, where they are others than those of the call before."""
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
    """The tensors among a call's results, in their order."""
    if isinstance(result, torch.Tensor):
        return [result]
    return [leaf for leaf in leaves(result) if isinstance(leaf, torch.Tensor)]
