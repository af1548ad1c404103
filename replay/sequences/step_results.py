"""Results of a step replay, and the captured times and memory with which they are compared."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from opgrip.replay.cases.flow import FlowingCall, ProgramFlow
from opgrip.replay.modes import EAGER
from opgrip.replay.results.results import CONTENDED, FAILED, OK, RAN
from opgrip.replay.sequences.call_timers import CallProgram, typical_ns
from opgrip.replay.sequences.dry_run import REPLAYED, SUBSTITUTED, UNSUPPORTED, CallPlan
from opgrip.replay.sequences.step_passes import PairedSaving, Pass, Passes
from opgrip.replay.timing.samples import LEAST
from opgrip.traces import Trace

Times: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"
Flags: TypeAlias = "np.ndarray[Any, np.dtype[np.bool_]]"


@dataclass(frozen=True, slots=True)
class SignatureTimes:
    """How the calls of a signature ran, and their times over all timed runs of the step.

    substituted : number of calls that ran on generated arguments
    spread : interquartile range of the timings, relative to their median
    host_us : median by the host's clock if the other times are by a device's clock
    """

    signature: int
    count: int
    substituted: int
    not_run: int
    redrawn: int
    status: str
    reason: str
    samples: int = 0
    median_us: float | None = None
    p10_us: float | None = None
    p90_us: float | None = None
    mean_us: float | None = None
    spread: float | None = None
    host_us: float | None = None
    note: str = ""
    first_ms: float | None = None
    max_abs: float | None = None
    max_rel: float | None = None
    dropped: int = 0
    slowed: float | None = None


@dataclass(frozen=True, slots=True)
class NotReplayed:
    op: str
    status: str
    reason: str
    count: int


@dataclass(frozen=True, slots=True)
class SequenceResult:
    """Times and memory of a whole step.

    replayed : number of calls that ran on the results of earlier calls
    substituted : number of calls that ran on generated arguments
    captured_ms : sum of the times of all calls, by the device's clock for calls that ran on a device
    captured_wall_ms : time from the start of the first call to the end of the last
    captured_device_ms : time that an accelerator was busy; None if the trace lacks it
    critical_calls : number of calls on the captured critical path: the slowest chain in which each call takes results
        of the previous one
    in_eager : number of calls that ran in eager because the mode cannot run them or returns other results
    has_dataflow : False if the trace does not say which memory calls use, so that memory and the critical path are
        unknown
    saved : share of the step's time that the mode saves; None if it was not compared in pairs with eager
    """

    device: str
    calls: int
    replayed: int
    substituted: int
    unsupported: int
    redrawn: int
    not_replayed: tuple[NotReplayed, ...]
    captured_ms: float
    captured_host_ms: float
    captured_wall_ms: float
    captured_device_ms: float | None
    unsupported_ms: float
    unsupported_host_ms: float
    replayed_ms: tuple[float, ...]
    replayed_host_ms: tuple[float, ...]
    replayed_wall_ms: tuple[float, ...]
    outside_bytes: int
    captured_peak_bytes: int
    replayed_peak_bytes: int
    critical_calls: int
    captured_critical_ms: float
    replayed_critical_ms: float
    signatures: tuple[SignatureTimes, ...]
    mode: str = EAGER
    in_eager: int = 0
    failure: str = ""
    slowed_passes: int = 0
    dropped_passes: int = 0
    is_contended: bool = False
    streams: int = 1
    graphs: int = 0
    between_graphs: int = 0
    has_dataflow: bool = True
    saved: PairedSaving | None = None

    @property
    def repeats(self) -> int:
        return len(self.replayed_host_ms)

    @property
    def timed_passes(self) -> int:
        return self.repeats + (0 if self.device == "cpu" else len(self.replayed_ms))

    @property
    def has_device_times(self) -> bool:
        return self.captured_device_ms is not None or self.device != "cpu"

    @property
    def has_captured_times(self) -> bool:
        return self.captured_ms > 0

    def replayed_quantile_ms(self, share: float) -> float:
        return _quantile(self.replayed_ms, share)

    def host_quantile_ms(self, share: float) -> float:
        return _quantile(self.replayed_host_ms, share)

    def wall_quantile_ms(self, share: float) -> float:
        return _quantile(self.replayed_wall_ms, share)


def make_result(
    trace: Trace, flow: ProgramFlow, plans: Sequence[CallPlan], on_host: Passes, on_device: Passes, device: str
) -> SequenceResult:
    """Return the result of a step from its plans and timed runs.

    on_host, on_device : runs timed with the host's clock, and with the device's (none on the CPU)
    """
    passes, shown = on_host.kept, on_device if on_device.kept else on_host
    failure = "" if passes else f"all {on_host.failures} passes failed, the last one in {on_host.failure}"
    count = Counter(plan.status for plan in plans)
    reasons = Counter(
        (call.op, plan.status, plan.reason)
        for call, plan in zip(flow.calls, plans, strict=True)
        if plan.status != REPLAYED
    )
    paired = list(zip(flow.calls, plans, strict=True))
    device_ns = trace.own_calls["device_ns"]
    unsupported = [call for call, plan in paired if plan.status == UNSUPPORTED]
    critical = [index for index in flow.critical_path if plans[index].status != UNSUPPORTED]
    typical = typical_ns([one.times_ns for one in shown.kept]) if passes else [math.nan] * len(plans)
    return SequenceResult(
        device=device,
        calls=len(flow.calls),
        replayed=count[REPLAYED],
        substituted=count[SUBSTITUTED],
        unsupported=count[UNSUPPORTED],
        redrawn=sum(bool(plan.refilled) for plan in plans),
        not_replayed=tuple(NotReplayed(*key, number) for key, number in reasons.most_common()),
        captured_ms=sum(call.captured_ns for call in flow.calls) / 1e6,
        captured_host_ms=sum(call.captured_host_ns for call in flow.calls) / 1e6,
        captured_wall_ms=flow.wall_ns / 1e6,
        captured_device_ms=float(device_ns.sum()) / 1e6 if device_ns.notna().any() else None,
        unsupported_ms=sum(call.captured_ns for call in unsupported) / 1e6,
        unsupported_host_ms=sum(call.captured_host_ns for call in unsupported) / 1e6,
        replayed_ms=tuple(sum(one.times_ns) / 1e6 for one in shown.kept),
        replayed_host_ms=tuple(sum(one.times_ns) / 1e6 for one in passes),
        replayed_wall_ms=tuple(one.wall_ns / 1e6 for one in passes),
        outside_bytes=flow.outside_bytes,
        captured_peak_bytes=flow.peak_bytes,
        replayed_peak_bytes=max((one.peak_bytes for one in passes), default=0),
        has_dataflow=bool(flow.needs),
        critical_calls=len(flow.critical_path),
        captured_critical_ms=sum(flow.calls[index].captured_ns for index in critical) / 1e6,
        replayed_critical_ms=sum(typical[index] for index in critical) / 1e6,
        signatures=tuple(_signatures(paired, shown, passes, failure)),
        failure=failure,
        slowed_passes=on_host.slowed + on_device.slowed,
        dropped_passes=sum(passes.dropped + len(passes.contended) for passes in (on_host, on_device)),
        is_contended=on_host.is_contended or on_device.is_contended,
    )


def under_mode(result: SequenceResult, mode: str, programs: Mapping[int, CallProgram]) -> SequenceResult:
    signatures, in_eager = [], 0
    for item in result.signatures:
        own = programs.get(item.signature)
        row = item
        if own is not None and item.status in RAN:
            if own.program is None:
                in_eager += item.count - item.not_run
                counts = (item.count, item.substituted, item.not_run, item.redrawn)
                row = SignatureTimes(item.signature, *counts, own.status, own.reason)
            row = replace(
                row,
                note=own.program.note if own.program else "",
                first_ms=own.first_ms,
                max_abs=own.max_abs,
                max_rel=own.max_rel,
            )
        signatures.append(row)
    return replace(result, mode=mode, in_eager=in_eager, signatures=tuple(signatures))


def _signatures(
    paired: Sequence[tuple[FlowingCall, CallPlan]], shown: Passes, host_passes: Sequence[Pass], failure: str
) -> Iterator[SignatureTimes]:
    passes = [*shown.kept, *shown.contended]
    places_of: dict[int, list[int]] = {}
    for index, (call, _) in enumerate(paired):
        places_of.setdefault(call.signature, []).append(index)
    times_us, host_us = (np.array([one.times_ns for one in of], dtype=np.float64) / 1e3 for of in (passes, host_passes))
    on_device = frozenset[int]().union(*(one.on_device for one in passes))
    is_contended = np.zeros(times_us.shape, dtype=np.bool_)
    for number, one in enumerate(passes):
        is_contended[number, [index for index in one.contended_calls if index < len(paired)]] = True
    is_slowed = np.array([one.slowed and not one.is_contended for one in passes])
    for signature, indices in places_of.items():
        plans = [paired[index][1] for index in indices]
        ran = [index for index in indices if paired[index][1].status != UNSUPPORTED]
        count = Counter(plan.status for plan in plans)
        counts = Counter((plan.row_status, plan.reason) for plan in plans if plan.status != REPLAYED)
        status, reason = counts.most_common(1)[0][0] if counts else (OK, "")
        row = SignatureTimes(
            signature,
            count=len(plans),
            substituted=count[SUBSTITUTED],
            not_run=count[UNSUPPORTED],
            redrawn=sum(bool(plan.refilled) for plan in plans),
            status=OK if ran else status,
            reason=reason,
        )
        if ran and passes:
            row = _with_times(row, times_us[:, ran], is_contended[:, ran], is_slowed, len(shown.kept))
            row = replace(row, dropped=row.dropped + shown.dropped * len(ran))
            if not on_device.isdisjoint(ran):
                row = replace(row, host_us=float(np.median(host_us[:, ran])))
        elif ran:
            row = replace(row, status=FAILED, reason=failure)
        yield row


def _with_times(
    row: SignatureTimes, times_us: Times, is_contended: Flags, is_slowed: Flags, counted_passes: int
) -> SignatureTimes:
    least = min(LEAST, counted_passes * times_us.shape[1])
    selected = ~is_contended
    if selected[:counted_passes].sum() >= least:
        selected[counted_passes:] = False
    elif selected.sum() < least:
        row, selected[:], is_slowed = replace(row, status=CONTENDED), True, np.ones_like(is_slowed)
    dropped = int((~selected).sum())
    slowed = np.broadcast_to(is_slowed[:, None], times_us.shape)[selected]
    times_us = times_us[selected]
    p10, low, middle, high, p90 = map(float, np.quantile(times_us, (0.1, 0.25, 0.5, 0.75, 0.9)))
    return replace(
        row,
        samples=len(times_us),
        median_us=middle,
        p10_us=p10,
        p90_us=p90,
        mean_us=float(times_us.mean()),
        spread=(high - low) / middle if middle and len(times_us) > 1 else None,
        dropped=dropped,
        slowed=float(slowed.mean()),
    )


def _quantile(values: Sequence[float], share: float) -> float:
    return float(np.quantile(values, share)) if values else float("nan")
