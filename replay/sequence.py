"""Replays all calls of a trace in their order, each on what the calls before it made: the step's time and memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

import numpy as np
import torch

from opgrip.replay.flow import Flow, FlowingCall, make_flow
from opgrip.replay.inputs import DeviceMap
from opgrip.replay.memory import Memory, room_on
from opgrip.replay.operators import TRUSTED_EXTENSIONS
from opgrip.replay.rehearsal import REPLAYED, SUBSTITUTED, UNSUPPORTED, Part, Rehearsal, switching
from opgrip.replay.timing import _no_garbage_collection, synchronizer
from opgrip.traces import Trace
from opgrip.traces.errors import UserError, one_line

FEWEST, MOST = 3, 100
"""Timed passes over a trace where their number is not given."""
MOST_FAILURES = 20


@dataclass(frozen=True, slots=True)
class SequenceSettings:
    """How a sequence is replayed.

    Attributes
    ----------
    place : where tensors go that were recorded on a device
    device : what the result names, and what is waited for
    seed : of the values that are drawn, and of the operators that draw
    extensions : extension modules whose functions may be called
    repeats : timed passes; None for as many as it takes to come to `precision` within `budget_s`, 3 at least
    precision : interquartile range of the passes' times, by their median
    room_bytes : memory that may be taken; None for most of what there is
    """

    place: DeviceMap
    device: str
    seed: int = 0
    extensions: Collection[str] = TRUSTED_EXTENSIONS
    repeats: int | None = None
    precision: float = 0.05
    budget_s: float = 10.0
    room_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class OperatorTime:
    """An operator's share: how many of its calls ran, and what they took in the program and in the median pass."""

    op: str
    count: int
    captured_us: float
    replayed_us: float


@dataclass(frozen=True, slots=True)
class NotReplayed:
    """Calls of an operator that did not run on what flows, by the reason; `status` is the word for how they ran."""

    op: str
    status: str
    reason: str
    count: int


@dataclass(frozen=True, slots=True)
class SequenceResult:
    """What a whole sequence took.

    Attributes
    ----------
    calls : in the trace, without those that extension functions made
    replayed : of these, ran on what the calls before them made
    substituted : ran on drawn arguments, since what flowed did not lead to the recorded results
    unsupported : did not run
    redrawn : of those replayed, got some drawn values, since those that flowed were not in the recorded range
    not_replayed : the reasons, most calls first
    captured_ms, captured_wall_ms : sum of the calls' durations; from the start of the first to the end of the last
    captured_device_ms : sum of what they kept an accelerator busy; None where the trace does not tell
    unsupported_ms : of `captured_ms`, what belongs to calls that did not run
    replayed_ms, replayed_wall_ms : the same of each timed pass; on an accelerator, `replayed_ms` is of the launches
    outside_bytes : memory that is there before the first call
    captured_peak_bytes, replayed_peak_bytes : the most memory alive at once beside that; on CUDA, as its allocator has
        it, with what operators take for themselves
    operators : by falling time in the program
    """

    device: str
    calls: int
    replayed: int
    substituted: int
    unsupported: int
    redrawn: int
    not_replayed: tuple[NotReplayed, ...]
    captured_ms: float
    captured_wall_ms: float
    captured_device_ms: float | None
    unsupported_ms: float
    replayed_ms: tuple[float, ...]
    replayed_wall_ms: tuple[float, ...]
    outside_bytes: int
    captured_peak_bytes: int
    replayed_peak_bytes: int
    operators: tuple[OperatorTime, ...]

    @property
    def repeats(self) -> int:
        """Timed passes."""
        return len(self.replayed_ms)

    def replayed_quantile_ms(self, share: float) -> float:
        """What this share of the passes stayed under, by the sum of their calls' times."""
        return _quantile(self.replayed_ms, share)

    def wall_quantile_ms(self, share: float) -> float:
        """What this share of the passes stayed under, from their first call to their last."""
        return _quantile(self.replayed_wall_ms, share)


def replay_sequence(trace: Trace, settings: SequenceSettings) -> SequenceResult:
    """Run all calls of a trace in the order in which they started, in one thread, and measure that.

    Raises
    ------
    UserError : where the trace holds no calls
    """
    if trace.calls["inside"].isna().sum() == 0:
        raise UserError("the trace holds no calls", "capture a program that runs some")
    flow = make_flow(trace)
    room = room_on(settings.device) if settings.room_bytes is None else settings.room_bytes
    with _own_randomness(settings.device):
        memory = Memory(flow.needs, flow.outside, trace.values, settings.place, settings.seed, room)
        rehearsal = Rehearsal(flow, memory, trace.values, settings.place, settings.seed, settings.extensions)
        passes = _measure(rehearsal, settings)
    return _result(trace, flow, rehearsal.parts, passes, settings.device)


@dataclass(frozen=True, slots=True)
class _Pass:
    """One timed pass: each call's time, and that of the whole."""

    times_ns: list[int]
    wall_ns: int
    peak_bytes: int


def _measure(rehearsal: Rehearsal, settings: SequenceSettings) -> list[_Pass]:
    def begin() -> None:
        rehearsal.begin()
        _set_seed(settings.device, settings.seed)

    rehearsal.settle(begin)
    passes: list[_Pass] = []
    failures = 0
    with _no_garbage_collection():
        started = perf_counter_ns()
        while _wants_more(passes, perf_counter_ns() - started, settings) and failures < MOST_FAILURES:
            begin()
            timed = _pass(rehearsal, settings.device)
            if timed is None:
                # values that are not the same at each pass: it is found out anew what can run
                failures += 1
                rehearsal.settle(begin)
            else:
                passes.append(timed)
    return passes


def _pass(rehearsal: Rehearsal, device: str) -> _Pass | None:
    """Run all calls once; None where one failed that had not before."""
    synchronize = synchronizer(device)
    allocator = torch.cuda if torch.device(device).type == "cuda" else None
    at_start = 0
    if allocator is not None:
        allocator.reset_peak_memory_stats(device)
        at_start = allocator.memory_allocated(device)
    times = []
    with switching() as use:
        synchronize()
        start = perf_counter_ns()
        for call, part in zip(rehearsal.flow.calls, rehearsal.parts, strict=True):
            use(call.settings)
            try:
                times.append(_timed(rehearsal, call, part))
            except Exception as error:
                rehearsal.give_up(call, part, one_line(error, 120))
                return None
            rehearsal.memory.drop(call.over)
        synchronize()
        wall = perf_counter_ns() - start
    own = rehearsal.memory.peak_bytes
    return _Pass(times, wall, own if allocator is None else allocator.max_memory_allocated(device) - at_start)


def _timed(rehearsal: Rehearsal, call: FlowingCall, part: Part) -> int:
    """How long a call took, in ns; 0 for one that is not run."""
    if part.prepared is None:
        rehearsal.hand_on(call, part, None)
        return 0
    if part.redrawn:
        rehearsal.redraw(call, part)
    function = part.prepared.function
    args, kwargs = part.prepared.arguments(rehearsal.memory, call.takes)
    start = perf_counter_ns()
    result = function(*args, **kwargs)
    spent = perf_counter_ns() - start
    rehearsal.hand_on(call, part, result)
    return spent


def _wants_more(passes: Sequence[_Pass], spent_ns: int, settings: SequenceSettings) -> bool:
    if settings.repeats is not None:
        return len(passes) < settings.repeats
    if len(passes) < FEWEST:
        return True
    if len(passes) >= MOST or spent_ns > settings.budget_s * 1e9:
        return False
    on_cpu = torch.device(settings.device).type == "cpu"
    low, middle, high = np.quantile([sum(one.times_ns) if on_cpu else one.wall_ns for one in passes], (0.25, 0.5, 0.75))
    return bool(high - low > settings.precision * middle)


@contextmanager
def _own_randomness(device: str) -> Iterator[None]:
    """Operators in the block that draw random numbers leave the caller's as they are."""
    kind = torch.device(device).type
    if kind == "cpu":
        with torch.random.fork_rng(devices=[]):
            yield
    else:
        with torch.random.fork_rng(range(getattr(torch, kind).device_count()), device_type=kind):
            yield


def _set_seed(device: str, seed: int) -> None:
    # not torch.manual_seed, which would seed accelerators that are not used here
    torch.default_generator.manual_seed(seed)
    kind = torch.device(device).type
    if kind != "cpu":
        getattr(torch, kind).manual_seed_all(seed)


def _result(
    trace: Trace, flow: Flow, parts: Sequence[Part], passes: Sequence[_Pass], device: str
) -> SequenceResult:
    count = Counter(part.status for part in parts)
    reasons = Counter(
        (call.op, part.status, part.reason)
        for call, part in zip(flow.calls, parts, strict=True)
        if part.status != REPLAYED
    )
    paired = list(zip(flow.calls, parts, strict=True))
    device_ns = trace.calls.loc[trace.calls["inside"].isna(), "device_ns"]
    return SequenceResult(
        device=device,
        calls=len(flow.calls),
        replayed=count[REPLAYED],
        substituted=count[SUBSTITUTED],
        unsupported=count[UNSUPPORTED],
        redrawn=sum(bool(part.redrawn) for part in parts),
        not_replayed=tuple(NotReplayed(*key, number) for key, number in reasons.most_common()),
        captured_ms=sum(call.captured_ns for call in flow.calls) / 1e6,
        captured_wall_ms=flow.wall_ns / 1e6,
        captured_device_ms=float(device_ns.sum()) / 1e6 if device_ns.notna().any() else None,
        unsupported_ms=sum(call.captured_ns for call, part in paired if part.status == UNSUPPORTED) / 1e6,
        replayed_ms=tuple(sum(one.times_ns) / 1e6 for one in passes),
        replayed_wall_ms=tuple(one.wall_ns / 1e6 for one in passes),
        outside_bytes=flow.graph.outside_bytes,
        captured_peak_bytes=flow.graph.peak_bytes,
        replayed_peak_bytes=max((one.peak_bytes for one in passes), default=0),
        operators=tuple(_operators(paired, passes)),
    )


def _operators(paired: Sequence[tuple[FlowingCall, Part]], passes: Sequence[_Pass]) -> list[OperatorTime]:
    names = list(dict.fromkeys(call.op for call, _ in paired))
    code = {name: index for index, name in enumerate(names)}
    codes = np.array([code[call.op] for call, _ in paired])
    ran = np.array([part.status != UNSUPPORTED for _, part in paired])
    captured = np.array([call.captured_ns for call, _ in paired], dtype=np.float64)

    def summed(weights: Any) -> Any:
        return np.bincount(codes, weights, minlength=len(names))

    replayed = np.median([summed(one.times_ns) for one in passes] or [summed(captured * np.nan)], axis=0)
    columns = (summed(ran), summed(captured * ran) / 1e3, replayed / 1e3)
    table = [
        OperatorTime(name, int(count), float(before), float(now))
        for name, count, before, now in zip(names, *columns, strict=True)
    ]
    return sorted(table, key=lambda item: -item.captured_us)


def _quantile(values: Sequence[float], share: float) -> float:
    return float(np.quantile(values, share)) if values else float("nan")
