"""Step replay in one rank: a dry run and timed passes, together with the other ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from opgrip.cli.progress import ProgressCallback, ignore_progress
from opgrip.replay.cases.flow import FlowingCall, ProgramFlow, make_flow, new_memory
from opgrip.replay.inputs.input_options import trace_with_defaults
from opgrip.replay.operators.devices import check_use, is_accelerator, synchronizer
from opgrip.replay.operators.lookup import Operator, Unsupported
from opgrip.replay.results.results import UNSUPPORTED as NOT_SUPPORTED
from opgrip.replay.sequences.call_timers import HostTimer, SequenceSettings, Slowdown
from opgrip.replay.sequences.dry_run import SUBSTITUTED, UNSUPPORTED, CallPlan, DryRun
from opgrip.replay.sequences.ranks.control import Control
from opgrip.replay.sequences.ranks.plan import (
    GroupKey,
    Offer,
    RankPlan,
    exchanges_alone,
    make_plan,
    offer_of,
    wait_points,
)
from opgrip.replay.sequences.ranks.rank_collectives import (
    LOCAL,
    ReplayedCollective,
    as_tensors_alone,
    is_exchange,
    read_collective,
)
from opgrip.replay.sequences.ranks.running import (
    GLOO,
    GroupMembers,
    RankExchange,
    Started,
    backend_for,
    make_starter,
    why_not,
)
from opgrip.replay.sequences.step_memory import StepMemory, reason_of, room_on
from opgrip.replay.sequences.step_options import COLLECTIVES, RankOptions
from opgrip.replay.sequences.step_passes import Pass, Passes, run_timed
from opgrip.replay.sequences.step_replay import measure_passes, own_randomness
from opgrip.replay.sequences.step_results import SequenceResult, make_result
from opgrip.replay.timing import pages
from opgrip.replay.timing.rounds import NO_ROW
from opgrip.traces import Trace
from opgrip.traces.schema.records import Signature
from opgrip.traces.values import ValueModel


@dataclass(frozen=True, slots=True)
class Stamps:
    """Times of the collectives that a rank ran in one pass; each list has one entry per collective.

    places : index of the collective among the rank's collectives
    arrived_ns, done_ns : time at which the rank arrived at the collective, and at which the collective ended
    held_ns : how long the collective blocked the rank's thread
    """

    places: list[int]
    arrived_ns: list[int]
    done_ns: list[int]
    held_ns: list[int]


@dataclass(frozen=True, slots=True)
class RankStep:
    """Results of the step in one rank.

    result : times and memory of the rank's step
    plan : plan that says which collectives ran, and with which ranks
    signatures : signature number of each collective, in the order of the rank's calls
    left_out : number of collectives that did not run, by reason
    stamps : times of the collectives, for each pass whose times count
    """

    result: SequenceResult
    plan: RankPlan
    signatures: list[int]
    left_out: Mapping[str, int]
    stamps: list[Stamps]


def replay_step(
    part: Trace,
    settings: SequenceSettings,
    options: RankOptions,
    control: Control,
    on_progress: ProgressCallback = ignore_progress,
) -> RankStep:
    """Run the calls of this rank together with the other ranks, and return its results. Report the progress outside
    timed regions.

    part : trace with the calls of this rank
    control : connection to the other ranks
    Raises `UserError` if a rank ends, or if a collective for which others wait cannot run.
    """
    exchanges = _read(part)
    part = _with_tensors_alone(part, exchanges)
    whole, run_places = make_flow(part), None
    if options.only == COLLECTIVES:
        part = exchanges_alone(part)
        numbers = {signature.number for signature in part.signatures}
        run_places = [place for place, call in enumerate(whole.calls) if call.signature in numbers]
    part = trace_with_defaults(part)
    flow = make_flow(part)
    places = _places(flow, exchanges)
    collectives = {number: item for number, item in exchanges.items() if isinstance(item, ReplayedCollective)}
    on_gloo = backend_for(settings.device) == GLOO
    reasons = {number: why for number, item in collectives.items() if (why := why_not(item, on_gloo))}
    plan = _agree(flow, places, exchanges, reasons, options, control)
    members = _make_groups(plan, settings.device, control)
    starters = {
        number: make_starter(item, members[item.group.ranks, item.group.name])
        for number, item in collectives.items()
        if number not in reasons and (item.group.ranks, item.group.name) in members
    }
    left_out = {places[number]: why for number, why in plan.left_out[control.launch.rank].items()}
    waits = wait_points(whole, _places(whole, exchanges), run_places)
    with own_randomness(settings.device):
        memory = StepMemory(
            flow.needs, flow.outside, part.values, settings.place, settings.seed, _room(settings, control)
        )
        dry_run = RankDryRun(
            flow, memory, part.values, settings, control, exchanges.keys(), collectives, starters, left_out, waits
        )
        new = new_memory(part, flow) if pages.CONTROLLED and settings.device == "cpu" else {}

        def run_pass(dry_run: RankDryRun, device: str, watch: HostTimer, slowdown: Slowdown) -> tuple[Pass, str]:
            one, failure = run_timed(dry_run, device, watch, slowdown)
            for place, done in dry_run.exchange.done_ns.items() if not failure else ():
                one.times_ns[place] = done - dry_run.exchange.arrived_ns[place]
            return replace(one, stamps=_stamps(dry_run, places)), failure

        passes = measure_passes(dry_run, new, settings, on_progress, run_pass)
    result = make_result(part, flow, dry_run.plans, passes, Passes(), settings.device)
    signatures = [flow.calls[place].signature for place in places]
    return RankStep(result, plan, signatures, Counter(dry_run.left_out.values()), [one.stamps for one in passes.kept])


def _read(part: Trace) -> dict[int, ReplayedCollective | str]:
    """Return, by signature number, each collective of the rank, or the reason why it cannot run."""
    return {signature.number: _read_one(signature) for signature in filter(is_exchange, part.signatures)}


def _read_one(signature: Signature) -> ReplayedCollective | str:
    try:
        return read_collective(signature)
    except Unsupported as error:
        return str(error)


def _with_tensors_alone(part: Trace, exchanges: Mapping[int, ReplayedCollective | str]) -> Trace:
    signatures = [
        as_tensors_alone(item) if isinstance(exchanges.get(item.number), ReplayedCollective) else item
        for item in part.signatures
    ]
    return replace(part, signatures=signatures)


def _places(flow: ProgramFlow, exchanges: Mapping[int, object]) -> list[int]:
    return [place for place, call in enumerate(flow.calls) if call.signature in exchanges]


def _agree(
    flow: ProgramFlow,
    places: Sequence[int],
    exchanges: Mapping[int, ReplayedCollective | str],
    reasons: Mapping[int, str],
    options: RankOptions,
    control: Control,
) -> RankPlan:
    """Return the plan that says which collectives run.

    All ranks exchange the descriptions of their collectives, and compute the same plan from them.
    """
    numbers = list(exchanges)
    number_of = {signature: number for number, signature in enumerate(numbers)}
    offers = [offer_of(exchanges[number], reasons.get(number, "")) for number in numbers]
    mine = [[astuple(offer) for offer in offers], [number_of[flow.calls[place].signature] for place in places]]
    tables = [([Offer.from_plain(item) for item in theirs], calls) for theirs, calls in control.share(mine)]
    return make_plan(tables, options.scale_ranks)


def _make_groups(plan: RankPlan, device: str, control: Control) -> dict[GroupKey, GroupMembers]:
    """Create the process groups of the plan, and return the groups that contain this rank.

    Every rank has to create all groups, in the same order.
    """
    backend = backend_for(device)
    groups: dict[GroupKey, GroupMembers] = {}
    try:
        for (ranks, name), there in plan.groups.items():
            group = distributed.new_group(list(there), timedelta(seconds=control.timeout_s), backend)
            if control.launch.rank in there:
                present = tuple(place for place, rank in enumerate(ranks) if rank in there)
                groups[ranks, name] = GroupMembers(group, len(ranks), present, there, backend == GLOO)
    except RuntimeError as error:
        control.lost(error)
    return groups


def _room(settings: SequenceSettings, control: Control) -> int:
    room = room_on(settings.device) if settings.room_bytes is None else settings.room_bytes
    # ranks on one machine share its memory
    return room if is_accelerator(settings.device) else room // control.launch.local_world_size


def _stamps(dry_run: RankDryRun, places: Sequence[int]) -> Stamps:
    exchange = dry_run.exchange
    ran = [(number, place) for number, place in enumerate(places) if place in exchange.done_ns]
    return Stamps(
        [number for number, _ in ran],
        *([times[place] for _, place in ran] for times in (exchange.arrived_ns, exchange.done_ns, exchange.held_ns)),
    )


def _identity(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class RankDryRun(DryRun):
    """A dry run over the calls of one rank, and the plan for each call.

    A collective runs once in every pass, even if its arguments cannot be prepared as planned, because other ranks wait
    for it.

    exchanges : signature numbers of collectives and messages
    collectives, starters : collectives that run, and the functions that start them, by signature number
    left_out : reason why a collective does not run, by index of the call; calls that a group's backend cannot run are
        added
    waits : collectives that must have ended before a call, by index of the call
    exchange : runs the collectives of the current pass
    """

    def __init__(
        self,
        flow: ProgramFlow,
        memory: StepMemory,
        values: Mapping[int, ValueModel],
        settings: SequenceSettings,
        control: Control,
        exchanges: Collection[int],
        collectives: Mapping[int, ReplayedCollective],
        starters: Mapping[int, Callable[..., Started]],
        left_out: Mapping[int, str],
        waits: Mapping[int, list[int]],
    ) -> None:
        super().__init__(flow, memory, values, settings)
        self.has_others, self.is_first, self.processes = True, control.is_first, control.launch.local_world_size
        self.control = control
        self._exchanges, self._collectives, self._starters = exchanges, collectives, starters
        self.left_out = dict(left_out)
        self._place_of_call = {id(call): place for place, call in enumerate(self.flow.calls)}
        self.exchange = RankExchange(waits, synchronizer(self._device), is_accelerator(self._device), control.lost)

    def most(self, *numbers: int) -> list[int]:
        """Return the largest value of each number over all ranks."""
        return self.control.most(*numbers)

    def begins_pass(self, more: bool, begin: Callable[[], None]) -> bool:
        """Restore the state before the first call, and return True if rank 0 wants another pass (`more` in rank 0).

        A pass begins when all ranks have called this.
        """
        begin()
        return bool(self.control.most(int(more and self.is_first))[0])

    def begin(self) -> None:
        """Wait for the last collectives, and then restore all memory to its state before the first call."""
        self.exchange.begin()
        super().begin()

    def meets_others(self, call: FlowingCall, plan: CallPlan) -> bool:
        """Wait for the collectives that must have ended before a call. If the call is a collective, run it as planned
        with the other ranks and return True, else return False.
        """
        self.exchange.before(self.place_of(call))
        if not self.runs_with_others(call):
            return False
        try:
            if plan.redrawn:
                self.redraw(call, plan)
            self.pass_on_results(call, plan, self.meet(call, plan))
        except Unsupported as error:
            self.control.refuse(f"{call.op} ran before, but fails now: {error}")
        return True

    def finish(self) -> None:
        """Wait for all collectives of the pass."""
        self.exchange.finish()

    def runs_with_others(self, call: FlowingCall) -> bool:
        """Return True if a call is a collective, and the replay does not leave it out."""
        return call.signature in self._starters and self.place_of(call) not in self.left_out

    def place_of(self, call: FlowingCall) -> int:
        """Return the index of a call among the calls of this rank."""
        return self._place_of_call[id(call)]

    def meet(self, call: FlowingCall, plan: CallPlan) -> Any:
        """Start a planned collective with the other ranks and return its results; raise `Unsupported` if the group's
        backend cannot run it.
        """
        assert plan.prepared is not None, "prepared in the dry run"
        args, _ = plan.prepared.arguments(self.memory, call.inputs)
        self.announce(call.signature, NO_ROW)
        is_async = self._collectives[call.signature].is_async
        return self.exchange.start(self.place_of(call), self._starters[call.signature], args, is_async)

    def _try(self, call: FlowingCall, plan: CallPlan) -> bool:
        self.exchange.before(self.place_of(call))
        if call.signature not in self._exchanges:
            return super()._try(call, plan)
        before = plan.status, len(plan.redrawn)
        result = None
        if self.runs_with_others(call):
            self._make_ready(call, plan)
            try:
                result = self.meet(call, plan)
            except Unsupported as error:
                self.left_out[self.place_of(call)] = str(error)
        if not self.runs_with_others(call):
            reason = self.left_out.get(self.place_of(call), "it is left out")
            plan.status, plan.prepared, plan.reason = UNSUPPORTED, None, reason
            plan.row_status = NOT_SUPPORTED
        self.pass_on_results(call, plan, result)
        self.memory.drop(call.over)
        return before != (plan.status, len(plan.redrawn))

    def _make_ready(self, call: FlowingCall, plan: CallPlan) -> None:
        """Prepare a collective on the results of earlier calls or, if that fails, on drawn values; if that fails too,
        end all ranks. The outcome is kept in `plan`.
        """
        reason = plan.reason
        if plan.status != SUBSTITUTED:
            try:
                plan.prepared = self._arrange(call, plan)
                self.redraw(call, plan)
                plan.prepared.arguments(self.memory, call.inputs)
                return
            except Exception as error:
                check_use(self._device, error)
                reason = reason_of(error)
        try:
            plan.status, plan.reason, plan.redrawn = SUBSTITUTED, reason, set()
            plan.prepared = self._prepare(call.signature, frozenset(range(len(call.inputs))))
        except Exception as error:
            check_use(self._device, error)
            self.control.refuse(f"{call.op} cannot be run, for which the other ranks wait: {reason_of(error)}")

    def _find(self, signature: int) -> Operator:
        record = self.flow.signatures.get(signature)
        if signature in self._exchanges:
            if signature not in self._starters:
                raise Unsupported("the step leaves out this collective")
            return Operator(self._starters[signature], mutates=True)
        if record is not None and record.op in LOCAL:
            return Operator(_identity, mutates=False)
        return super()._find(signature)
