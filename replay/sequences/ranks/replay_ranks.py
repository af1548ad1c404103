"""Step replay by several ranks together, and the results that rank 0 collects from all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from time import perf_counter_ns
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import distributed

from opgrip.cli.progress import ProgressCallback, ignore_progress
from opgrip.errors import UserError
from opgrip.replay.cases.cases import make_cases
from opgrip.replay.cases.flow import FlowingCall, ProgramFlow, make_flow, new_memory
from opgrip.replay.inputs.filling import trace_with_defaults
from opgrip.replay.modes import EAGER
from opgrip.replay.operators.devices import check_use, is_accelerator, synchronizer
from opgrip.replay.operators.lookup import Operator, Unsupported
from opgrip.replay.results.results import UNSUPPORTED as NOT_SUPPORTED
from opgrip.replay.results.results import Result
from opgrip.replay.run.workload import Workload
from opgrip.replay.sequences.call_timers import HostTimer, SequenceSettings, sequence_settings
from opgrip.replay.sequences.dry_run import SUBSTITUTED, UNSUPPORTED, CallPlan, DryRun
from opgrip.replay.sequences.ranks.control import Control
from opgrip.replay.sequences.ranks.plan import (
    GroupKey,
    Meeting,
    Offer,
    RankPlan,
    exchanges_alone,
    make_plan,
    offer_of,
    part_of,
    recorded_ranks,
    wait_points,
)
from opgrip.replay.sequences.ranks.rank_collectives import (
    GLOO,
    LOCAL,
    GroupMembers,
    RankExchange,
    ReplayedCollective,
    Started,
    as_tensors_alone,
    backend_for,
    is_exchange,
    make_starter,
    read_collective,
    why_not,
)
from opgrip.replay.sequences.step_memory import StepMemory, reason_of, room_on
from opgrip.replay.sequences.step_options import COLLECTIVES, RankColumns, RankOptions, rows_of, totals_of
from opgrip.replay.sequences.step_passes import Pass, Passes, run_timed
from opgrip.replay.sequences.step_replay import measure_passes, own_randomness
from opgrip.replay.sequences.step_results import SequenceResult, make_result
from opgrip.replay.timing import pages
from opgrip.replay.timing.disturbances import PassWatch
from opgrip.replay.timing.rounds import NO_ROW
from opgrip.traces import Trace
from opgrip.traces.analysis.ranks.collectives import bus_factor
from opgrip.traces.schema.records import Signature
from opgrip.traces.values import ValueModel


@dataclass(frozen=True, slots=True)
class RankOutcome:
    rank: int
    totals: dict[str, Any]
    times: RankTotals
    left_out: dict[str, int]


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """Results of a step replay in all ranks.

    collectives : times of the collectives by kind, group and size
    """

    recorded: int
    ranks: list[RankOutcome]
    rows: list[Result]
    collectives: list[CollectiveTimes]

    def plain(self) -> dict[str, Any]:
        return {
            "recorded": self.recorded,
            "ranks": [
                {**item.totals, **asdict(item.times), "rank": item.rank, "left_out": item.left_out}
                for item in self.ranks
            ],
            "collectives": [asdict(item) for item in self.collectives],
        }


def replay_ranks(
    workload: Workload, options: RankOptions, control: Control, on_progress: ProgressCallback = ignore_progress
) -> StepOutcome | None:
    """Replay this rank's part of a trace with the other ranks; return all results in rank 0, else None."""
    settings = sequence_settings(workload)
    if settings.mode != EAGER:
        raise UserError("ranks can be replayed only in the mode eager", "leave out --mode")
    rank, world_size = control.launch.rank, control.launch.world_size
    # checked here so that only one rank reports it; checked again when groups are created
    control.together(lambda: backend_for(settings.device))
    part = control.together(lambda: part_of(workload.trace, rank, world_size))
    step = replay_step(part, settings, options, control, on_progress)
    cases = make_cases(part)
    rows = rows_of(step.result, cases, workload)
    offsets = clock_offsets_ns(control)
    stamps = share_stamps(control, step.stamps)
    mine = {
        "rows": [row.to_plain() for row in rows],
        "totals": totals_of(step.result),
        "signatures": step.signatures,
        "left_out": dict(step.left_out),
    }
    everyone = control.share(mine)
    if not control.is_first:
        return None
    times = CollectiveStepTimes(step.plan.meetings, stamps, [item["signatures"] for item in everyone], offsets)
    ranks = [
        RankOutcome(number, item["totals"], times.totals[number], item["left_out"])
        for number, item in enumerate(everyone)
    ]
    all_rows = [
        Result.from_plain(cells).adding(times.own(number, int(cells["case"])) or RankColumns(number))
        for number, item in enumerate(everyone)
        for cells in item["rows"]
    ]
    return StepOutcome(len(recorded_ranks(workload.trace)), ranks, all_rows, times.together())


ROUNDS = 20  # number of times to query another clock; the fastest answer counts


def clock_offsets_ns(control: Control) -> list[int]:
    """Return, for each rank, by how many ns its clock is ahead of rank 0's; all ranks must call this."""
    machines = control.share(machine())
    offsets = [0] * len(machines)
    first_of = {name: rank for rank, name in reversed(list(enumerate(machines)))}
    for name, rank in sorted(first_of.items(), key=lambda item: item[1]):
        if name != machines[0]:
            offset = ask_clock(control, rank)
            offsets = [offset if other == name else earlier for other, earlier in zip(machines, offsets, strict=True)]
    # only rank 0 has queried the clocks
    return [int(offset) for offset in control.share(offsets)[0]]


def machine() -> str:
    """Return an identifier of this machine that stays the same until the machine restarts; empty if there is none."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""


def ask_clock(control: Control, rank: int) -> int:
    """Return in rank 0 by how many ns another rank's clock is ahead; both ranks must call this."""
    if control.launch.rank not in (0, rank):
        return 0
    message = torch.zeros(1, dtype=torch.int64)
    answers: list[tuple[int, int]] = []
    try:
        for _ in range(ROUNDS):
            if control.is_first:
                asked_ns = perf_counter_ns()
                distributed.send(message, rank)
                distributed.recv(message, rank)
                answered = perf_counter_ns()
                answers.append((answered - asked_ns, int(message) - (asked_ns + answered) // 2))
            else:
                distributed.recv(message, 0)
                message.fill_(perf_counter_ns())
                distributed.send(message, 0)
    except RuntimeError as error:
        control.lost(error)
    return min(answers)[1] if answers else 0


Times: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"


@dataclass(frozen=True, slots=True)
class CollectiveTimes:
    """Times of the collectives of one kind, group and size over all timed runs of the step.

    bytes : size of the data, as nccl-tests defines it
    median_us, p10_us, p90_us : time from the arrival of the last rank until all ranks have finished
    wait_us : median time that the first rank to arrive waited for the last one
    """

    kind: str
    group: str
    ranks: tuple[int, ...]
    bytes: int
    dtype: str
    reduction: str
    calls: int
    median_us: float
    p10_us: float
    p90_us: float
    algorithm_gb_per_s: float | None
    bus_gb_per_s: float | None
    wait_us: float
    last_rank: int
    last_share: float


@dataclass(slots=True)
class RankTotals:
    """Totals of one rank; times are medians over the timed runs of the step.

    held_ms : time that collectives blocked the rank's thread
    waited_ms : time from the rank's arrival at collectives to the arrival of the last rank
    """

    collectives: int = 0
    held_ms: float = 0.0
    waited_ms: float = 0.0


def share_stamps(control: Control, stamps: Sequence[Stamps]) -> list[list[Stamps]]:
    numbers = [
        number
        for one in stamps
        for number in (len(one.places), *one.places, *one.arrived_ns, *one.done_ns, *one.held_ns)
    ]
    return [_unpacked(part.tolist()) for part in control.share_tensors(torch.tensor(numbers, dtype=torch.int64))]


def _unpacked(numbers: list[int]) -> list[Stamps]:
    stamps, at = [], 0
    while at < len(numbers):
        count = numbers[at]
        parts = [numbers[at + 1 + part * count : at + 1 + (part + 1) * count] for part in range(4)]
        stamps.append(Stamps(*parts))
        at += 1 + 4 * count
    return stamps


@dataclass(slots=True)
class _Samples:
    meeting: Meeting
    calls: int = 0
    exchange: list[Times] = field(default_factory=list)
    longest_wait: list[Times] = field(default_factory=list)
    last: Counter[int] = field(default_factory=Counter)
    waits: dict[int, list[Times]] = field(default_factory=dict)
    helds: dict[int, list[Times]] = field(default_factory=dict)


class CollectiveStepTimes:
    """Times of the collectives of all ranks, summarized by kind of collective and by rank.

    offsets_ns : for each rank, by how many ns its clock is ahead of rank 0's
    """

    def __init__(
        self,
        meetings: Iterable[Meeting],
        stamps: Sequence[Sequence[Stamps]],
        signatures: Sequence[Sequence[int]],
        offsets_ns: Sequence[int],
    ) -> None:
        self._together: dict[tuple[Any, ...], _Samples] = {}
        self._own: dict[tuple[int, int], _Samples] = {}
        self.totals = [RankTotals() for _ in stamps]
        clocks = [_clocks(own, offset) for own, offset in zip(stamps, offsets_ns, strict=True)]
        waited = [np.zeros(len(own)) for own in stamps]
        held = [np.zeros(len(own)) for own in stamps]
        for meeting in meetings:
            if any(index not in clocks[rank] for rank, index in meeting.places.items()):
                # the backend could not run the collective
                continue
            arrived, done, held_up = (
                np.array([clocks[rank][index][which] for rank, index in meeting.places.items()]) for which in range(3)
            )
            last = arrived.max(axis=0)
            exchange, waits = (done.max(axis=0) - last) / 1e3, (last - arrived) / 1e3
            key = (meeting.kind, meeting.group, meeting.members, meeting.bytes, meeting.dtype, meeting.reduction)
            samples = self._together.setdefault(key, _Samples(meeting))
            samples.calls += 1
            samples.exchange.append(exchange)
            samples.longest_wait.append(waits.max(axis=0))
            ranks = list(meeting.places)
            samples.last.update(ranks[index] for index in arrived.argmax(axis=0))
            for number, (rank, index) in enumerate(meeting.places.items()):
                own = self._own.setdefault((rank, signatures[rank][index]), _Samples(meeting))
                own.exchange.append(exchange)
                own.waits.setdefault(rank, []).append(waits[number])
                own.helds.setdefault(rank, []).append(held_up[number] / 1e3)
                self.totals[rank].collectives += 1
                waited[rank] += waits[number] / 1e3
                held[rank] += held_up[number] / 1e6
        for rank, totals in enumerate(self.totals):
            if len(waited[rank]):
                totals.waited_ms, totals.held_ms = float(np.median(waited[rank])), float(np.median(held[rank]))

    def together(self) -> list[CollectiveTimes]:
        rows = [_collective_times(samples) for samples in self._together.values()]
        return sorted(rows, key=lambda row: -row.median_us * row.calls)

    def own(self, rank: int, signature: int) -> RankColumns | None:
        samples = self._own.get((rank, signature))
        if samples is None:
            return None
        meeting, exchange_us = samples.meeting, _median(samples.exchange)
        algorithm_gb_per_s, bus_gb_per_s = _bandwidths(meeting, exchange_us)
        return RankColumns(
            rank=rank,
            group_ranks=",".join(map(str, meeting.members)),
            exchanged_bytes=meeting.bytes,
            exchange_us=exchange_us,
            wait_us=_median(samples.waits[rank]),
            held_us=_median(samples.helds[rank]),
            algorithm_gb_per_s=algorithm_gb_per_s,
            bus_gb_per_s=bus_gb_per_s,
        )


def _clocks(stamps: Sequence[Stamps], offset_ns: int) -> Mapping[int, tuple[Times, Times, Times]]:
    indices = set(stamps[0].places).intersection(*(one.places for one in stamps)) if stamps else set()
    passes = [
        {index: values for index, *values in zip(one.places, one.arrived_ns, one.done_ns, one.held_ns, strict=True)}
        for one in stamps
    ]
    return {
        index: (
            np.array([one[index][0] - offset_ns for one in passes], dtype=np.float64),
            np.array([one[index][1] - offset_ns for one in passes], dtype=np.float64),
            np.array([one[index][2] for one in passes], dtype=np.float64),
        )
        for index in indices
    }


def _collective_times(samples: _Samples) -> CollectiveTimes:
    meeting = samples.meeting
    low, middle, high = map(float, np.quantile(np.concatenate(samples.exchange), (0.1, 0.5, 0.9)))
    (last_rank, times), *_ = samples.last.most_common(1)
    algorithm_gb_per_s, bus_gb_per_s = _bandwidths(meeting, middle)
    return CollectiveTimes(
        kind=meeting.kind,
        group=meeting.group[1],
        ranks=meeting.members,
        bytes=meeting.bytes,
        dtype=meeting.dtype,
        reduction=meeting.reduction,
        calls=samples.calls,
        median_us=middle,
        p10_us=low,
        p90_us=high,
        algorithm_gb_per_s=algorithm_gb_per_s,
        bus_gb_per_s=bus_gb_per_s,
        wait_us=_median(samples.longest_wait),
        last_rank=last_rank,
        last_share=times / samples.last.total(),
    )


def _bandwidths(meeting: Meeting, exchange_us: float) -> tuple[float | None, float | None]:
    if not meeting.bytes or exchange_us <= 0:
        return None, None
    algorithm = meeting.bytes / exchange_us / 1e3
    return algorithm, algorithm * bus_factor(meeting.kind, len(meeting.members))


def _median(times: Sequence[Times]) -> float:
    return float(np.median(np.concatenate(times)))


@dataclass(frozen=True, slots=True)
class Stamps:
    """Times of the collectives that a rank ran in one run of the step; each list has one item per collective.

    held_ns : time for which each collective blocked the rank's thread
    """

    places: list[int]
    arrived_ns: list[int]
    done_ns: list[int]
    held_ns: list[int]


@dataclass(frozen=True, slots=True)
class RankStep:
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
    # by signature number, each collective of the rank, or the reason why it cannot run
    exchanges = {signature.number: _read_one(signature) for signature in filter(is_exchange, part.signatures)}
    part = _with_tensors_alone(part, exchanges)
    whole, run_places = make_flow(part), None
    if options.only == COLLECTIVES:
        part = exchanges_alone(part)
        numbers = {signature.number for signature in part.signatures}
        run_places = [index for index, call in enumerate(whole.calls) if call.signature in numbers]
    part = trace_with_defaults(part)
    flow = make_flow(part)
    indices = _places(flow, exchanges)
    collectives = {number: item for number, item in exchanges.items() if isinstance(item, ReplayedCollective)}
    on_gloo = backend_for(settings.device) == GLOO
    reasons = {number: why for number, item in collectives.items() if (why := why_not(item, on_gloo))}
    plan = _agree(flow, indices, exchanges, reasons, options, control)
    members = _make_groups(plan, settings.device, control)
    starters = {
        number: make_starter(item, members[item.group.ranks, item.group.name])
        for number, item in collectives.items()
        if number not in reasons and (item.group.ranks, item.group.name) in members
    }
    left_out = {indices[number]: why for number, why in plan.left_out[control.launch.rank].items()}
    waits = wait_points(whole, _places(whole, exchanges), run_places)
    with own_randomness(settings.device):
        memory = StepMemory(
            flow.needs, flow.outside, part.values, settings.place, settings.seed, _room(settings, control)
        )
        dry_run = RankDryRun(
            flow, memory, part.values, settings, control, exchanges.keys(), collectives, starters, left_out, waits
        )
        new = new_memory(part, flow) if pages.CONTROLLED and settings.device == "cpu" else {}

        def run_pass(dry_run: RankDryRun, device: str, timer: HostTimer, watch: PassWatch) -> tuple[Pass, str]:
            one, failure = run_timed(dry_run, device, timer, watch)
            for index, done in dry_run.exchange.done_ns.items() if not failure else ():
                one.times_ns[index] = done - dry_run.exchange.arrived_ns[index]
            return replace(one, stamps=_stamps(dry_run, indices)), failure

        passes = measure_passes(dry_run, new, settings, on_progress, run_pass)
    result = make_result(part, flow, dry_run.plans, passes, Passes(), settings.device)
    signatures = [flow.calls[index].signature for index in indices]
    return RankStep(result, plan, signatures, Counter(dry_run.left_out.values()), [one.stamps for one in passes.kept])


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
    return [index for index, call in enumerate(flow.calls) if call.signature in exchanges]


def _agree(
    flow: ProgramFlow,
    indices: Sequence[int],
    exchanges: Mapping[int, ReplayedCollective | str],
    reasons: Mapping[int, str],
    options: RankOptions,
    control: Control,
) -> RankPlan:
    numbers = list(exchanges)
    number_of = {signature: number for number, signature in enumerate(numbers)}
    offers = [offer_of(exchanges[number], reasons.get(number, "")) for number in numbers]
    mine = [[astuple(offer) for offer in offers], [number_of[flow.calls[index].signature] for index in indices]]
    tables = [([Offer.from_plain(item) for item in theirs], calls) for theirs, calls in control.share(mine)]
    return make_plan(tables, options.scale_ranks)


def _make_groups(plan: RankPlan, device: str, control: Control) -> dict[GroupKey, GroupMembers]:
    # every rank has to create all groups, in the same order
    backend = backend_for(device)
    groups: dict[GroupKey, GroupMembers] = {}
    try:
        for (ranks, name), there in plan.groups.items():
            group = distributed.new_group(list(there), timedelta(seconds=control.timeout_s), backend)
            if control.launch.rank in there:
                present = tuple(index for index, rank in enumerate(ranks) if rank in there)
                groups[ranks, name] = GroupMembers(group, len(ranks), present, there, backend == GLOO)
    except RuntimeError as error:
        control.lost(error)
    return groups


def _room(settings: SequenceSettings, control: Control) -> int:
    room = room_on(settings.device) if settings.room_bytes is None else settings.room_bytes
    # ranks on one machine share its memory
    return room if is_accelerator(settings.device) else room // control.launch.local_world_size


def _stamps(dry_run: RankDryRun, indices: Sequence[int]) -> Stamps:
    exchange = dry_run.exchange
    ran = [(number, index) for number, index in enumerate(indices) if index in exchange.done_ns]
    return Stamps(
        [number for number, _ in ran],
        *([times[index] for _, index in ran] for times in (exchange.arrived_ns, exchange.done_ns, exchange.held_ns)),
    )


class RankDryRun(DryRun):
    """A dry run over the calls of one rank, and the plan for each call.

    collectives, starters : collectives that run, and the functions that start them, by signature number
    left_out : reason why a collective does not run, by index of the call
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
        self._place_of_call = {id(call): index for index, call in enumerate(self.flow.calls)}
        self.exchange = RankExchange(waits, synchronizer(self._device), is_accelerator(self._device), control.lost)

    def most(self, *numbers: int) -> list[int]:
        return self.control.most(*numbers)

    def begins_pass(self, more: bool, begin: Callable[[], None]) -> bool:
        begin()
        return bool(self.control.most(int(more and self.is_first))[0])

    def begin(self) -> None:
        self.exchange.begin()
        super().begin()

    def meets_others(self, call: FlowingCall, plan: CallPlan) -> bool:
        self.exchange.before(self.place_of(call))
        if not self.runs_with_others(call):
            return False
        try:
            if plan.refilled:
                self.refill(call, plan)
            self.pass_on_results(call, plan, self.meet(call, plan))
        except Unsupported as error:
            self.control.refuse(f"{call.op} ran before, but fails now: {error}")
        return True

    def finish(self) -> None:
        self.exchange.finish()

    def runs_with_others(self, call: FlowingCall) -> bool:
        return call.signature in self._starters and self.place_of(call) not in self.left_out

    def place_of(self, call: FlowingCall) -> int:
        return self._place_of_call[id(call)]

    def meet(self, call: FlowingCall, plan: CallPlan) -> Any:
        assert plan.prepared is not None, "prepared in the dry run"
        args, _ = plan.prepared.arguments(self.memory, call.inputs)
        self.announce(call.signature, NO_ROW)
        is_async = self._collectives[call.signature].is_async
        return self.exchange.start(self.place_of(call), self._starters[call.signature], args, is_async)

    def _try(self, call: FlowingCall, plan: CallPlan) -> bool:
        self.exchange.before(self.place_of(call))
        if call.signature not in self._exchanges:
            return super()._try(call, plan)
        before = plan.status, len(plan.refilled)
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
        return before != (plan.status, len(plan.refilled))

    def _make_ready(self, call: FlowingCall, plan: CallPlan) -> None:
        reason = plan.reason
        if plan.status != SUBSTITUTED:
            try:
                plan.prepared = self._arrange(call, plan)
                self.refill(call, plan)
                plan.prepared.arguments(self.memory, call.inputs)
                return
            except Exception as error:
                check_use(self._device, error)
                reason = reason_of(error)
        try:
            plan.status, plan.reason, plan.refilled = SUBSTITUTED, reason, set()
            plan.prepared = self._prepare(call.signature, frozenset(range(len(call.inputs))))
        except Exception as error:
            check_use(self._device, error)
            self.control.refuse(f"{call.op}, for which the other ranks wait, cannot be run: {reason_of(error)}")

    def _find(self, signature: int) -> Operator:
        record = self.flow.signatures.get(signature)
        if signature in self._exchanges:
            if signature not in self._starters:
                raise Unsupported("the step leaves out this collective")
            return Operator(self._starters[signature], mutates=True)
        if record is not None and record.op in LOCAL:
            return Operator(lambda tensor: tensor, mutates=False)
        return super()._find(signature)
