"""Step replay in one rank: dry run and timed passes, together with the other ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import astuple, dataclass, replace
from datetime import timedelta
from time import perf_counter_ns

from torch import distributed

from opgrip.cli.progress import Tell, tell_nobody
from opgrip.replay.cases.flow import FlowingCall, NewMemory, ProgramFlow, make_flow, new_memory
from opgrip.replay.inputs.input_options import trace_with_defaults
from opgrip.replay.operators.devices import check_use, is_accelerator, synchronizer
from opgrip.replay.operators.lookup import Unsupported
from opgrip.replay.sequences.call_timers import HostTimer, Slowdown
from opgrip.replay.sequences.dry_run import NOTHING_EXCLUDED, CallPlan, switching
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
    ReplayedCollective,
    as_tensors_alone,
    is_exchange,
    read_collective,
)
from opgrip.replay.sequences.ranks.rank_dry_run import RankDryRun
from opgrip.replay.sequences.ranks.running import GLOO, GroupMembers, backend_for, make_starter, why_not
from opgrip.replay.sequences.step_memory import StepMemory, reason_of, room_on
from opgrip.replay.sequences.step_options import COLLECTIVES, RankOptions
from opgrip.replay.sequences.step_replay import (
    MOST_FAILURES,
    SequenceSettings,
    may_drop,
    own_randomness,
    run_call,
    set_seed,
    wants_more,
)
from opgrip.replay.sequences.step_results import Pass, Passes, SequenceResult, make_result
from opgrip.replay.timing import pages
from opgrip.replay.timing.rounds import no_garbage_collection
from opgrip.traces import Trace
from opgrip.traces.schema.records import Signature


@dataclass(frozen=True, slots=True)
class Stamps:
    """Times at which a rank arrived at its collectives in a pass, when they were done, and how long they blocked it.

    places : indices of the collectives that ran, in the rank's list of exchanges; the other attributes have one entry
    for each of them
    """

    places: list[int]
    arrived_ns: list[int]
    done_ns: list[int]
    held_ns: list[int]


@dataclass(frozen=True, slots=True)
class RankStep:
    """Results of the step in one rank.

    plan : which collectives ran, and with which ranks
    signatures : signature of each exchange, in the order of the rank's calls
    left_out : number of collectives that did not run, by reason
    stamps : times of each kept pass
    """

    result: SequenceResult
    plan: RankPlan
    signatures: list[int]
    left_out: Mapping[str, int]
    stamps: list[Stamps]


def replay_step(
    part: Trace, settings: SequenceSettings, options: RankOptions, control: Control, tell: Tell = tell_nobody
) -> RankStep:
    """Run the calls of this rank and return its results.

    Raises `UserError` if a rank ends, or if an awaited collective cannot run.
    """
    exchanges = _read(part)
    part = _with_tensors_alone(part, exchanges)
    whole, kept = make_flow(part), None
    if options.only == COLLECTIVES:
        part = exchanges_alone(part)
        numbers = {signature.number for signature in part.signatures}
        kept = [place for place, call in enumerate(whole.calls) if call.signature in numbers]
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
    waits = wait_points(whole, _places(whole, exchanges), kept)
    with own_randomness(settings.device):
        memory = StepMemory(
            flow.needs, flow.outside, part.values, settings.place, settings.seed, _room(settings, control)
        )
        dry_run = RankDryRun(
            *(control, exchanges.keys(), collectives, starters, left_out, waits),
            *(flow, memory, part.values, settings.place, settings.device, settings.seed, settings.extensions),
            *(NOTHING_EXCLUDED, lambda number, row: None),
        )
        new = new_memory(part, flow) if pages.CONTROLLED and settings.device == "cpu" else {}
        passes, stamps = _measure(dry_run, settings, new, places, tell)
    result = make_result(part, flow, dry_run.plans, passes, Passes(), settings.device)
    signatures = [flow.calls[place].signature for place in places]
    return RankStep(result, plan, signatures, Counter(dry_run.left_out.values()), stamps)


def _read(part: Trace) -> dict[int, ReplayedCollective | str]:
    """Return the collective of each exchanging signature, or why it cannot run, by signature number."""
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
    """Return the plan of which collectives run; all ranks exchange their offers and compute the same plan."""
    numbers = list(exchanges)
    number_of = {signature: number for number, signature in enumerate(numbers)}
    offers = [offer_of(exchanges[number], reasons.get(number, "")) for number in numbers]
    mine = [[astuple(offer) for offer in offers], [number_of[flow.calls[place].signature] for place in places]]
    tables = [([Offer.from_plain(item) for item in theirs], calls) for theirs, calls in control.share(mine)]
    return make_plan(tables, options.scale_ranks)


def _make_groups(plan: RankPlan, device: str, control: Control) -> dict[GroupKey, GroupMembers]:
    """Create the planned groups and return the ones of this rank; every rank creates all groups, in the same order."""
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


def _measure(
    dry_run: RankDryRun,
    settings: SequenceSettings,
    memory: Mapping[int, NewMemory],
    places: Sequence[int],
    tell: Tell,
) -> tuple[Passes, list[Stamps]]:
    """Time the same number of passes in each rank; rank 0 decides when they suffice."""
    if memory:
        pages.keep_freed_memory()
    control = dry_run.control

    def begin() -> None:
        dry_run.begin()
        set_seed(settings.device, settings.seed)

    dry_run.settle(begin, tell)
    timed, stamps = Passes(), list[tuple[Pass, Stamps]]()
    with no_garbage_collection(), closing(Slowdown(control.launch.local_world_size)) as slowdown:
        started = perf_counter_ns()
        while True:
            spent = perf_counter_ns() - started
            more = wants_more(timed, spent, settings) and timed.failures < MOST_FAILURES
            tell("timed runs", len(timed.kept), settings.repeats or len(timed.kept) + 1)
            begin()
            # a pass begins when all ranks have arrived here
            if not control.most(int(more and control.is_first))[0]:
                timed.settle()
                kept = set(map(id, timed.kept))
                return timed, [stamp for one, stamp in stamps if id(one) in kept]
            one, failure = _pass(dry_run, settings.device, HostTimer(memory), slowdown)
            allowed = control.is_first and may_drop(timed, perf_counter_ns() - started, settings)
            failed, slowed, contended, drops = control.most(bool(failure), one.slowed, one.is_contended, allowed)
            if failed:
                timed.fail(failure or "a call of another rank")
                dry_run.settle(begin, tell)
                continue
            one = replace(one, slowed=bool(slowed), is_contended=bool(contended))
            timed.add(one, bool(drops))
            stamps.append((one, _stamps(dry_run, places)))


def _stamps(dry_run: RankDryRun, places: Sequence[int]) -> Stamps:
    exchange = dry_run.exchange
    ran = [(number, place) for number, place in enumerate(places) if place in exchange.done_ns]
    return Stamps(
        [number for number, _ in ran],
        *([times[place] for _, place in ran] for times in (exchange.arrived_ns, exchange.done_ns, exchange.held_ns)),
    )


def _pass(dry_run: RankDryRun, device: str, watch: HostTimer, slowdown: Slowdown) -> tuple[Pass, str]:
    """Run all calls once; return the pass, and why its last failing call failed.

    It continues after a failure, since the other ranks wait for this rank's collectives.
    """
    synchronize, failure = synchronizer(device), ""
    with switching() as use:
        synchronize()
        slowdown.begin()
        start = perf_counter_ns()
        for call, plan in zip(dry_run.flow.calls, dry_run.plans, strict=True):
            use(call.settings)
            dry_run.before(call)
            if dry_run.runs_with_others(call):
                _exchange(dry_run, call, plan)
                watch.skip()
            else:
                try:
                    run_call(dry_run, call, plan, watch)
                except Exception as error:
                    check_use(device, error)
                    failure = f"{call.op}: {reason_of(error)}"
                    dry_run.give_up(call, plan, reason_of(error))
                    dry_run.hand_on(call, plan, None)
            dry_run.memory.drop(call.over)
            slowdown.check()
        dry_run.finish()
        synchronize()
        wall = perf_counter_ns() - start
        slowdown.end()
    times = watch.times_ns()
    if not failure:
        for place, done in dry_run.exchange.done_ns.items():
            times[place] = done - dry_run.exchange.arrived_ns[place]
    return Pass(
        *(times, wall, dry_run.memory.peak_bytes, frozenset[int]()),
        *(slowdown.is_slowed, slowdown.is_contended, slowdown.contended_calls),
    ), failure


def _exchange(dry_run: RankDryRun, call: FlowingCall, plan: CallPlan) -> None:
    try:
        if plan.redrawn:
            dry_run.redraw(call, plan)
        result = dry_run.meet(call, plan)
        dry_run.hand_on(call, plan, result)
    except Unsupported as error:
        dry_run.control.refuse(f"{call.op} ran before, and cannot now: {error}")
