"""What the replay of a whole sequence gave, beside what was captured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from opgrip.replay.cases.flow import Flow, FlowingCall
from opgrip.replay.sequences.rehearsal import REPLAYED, SUBSTITUTED, UNSUPPORTED, Part
from opgrip.traces import Trace


@dataclass(frozen=True, slots=True)
class OperatorTime:
    """An operator's share: how many of its calls ran, and what they took in the program and in the median pass.

    Attributes
    ----------
    captured_us, replayed_us : of the device for calls that worked on one
    captured_host_us, replayed_host_us : of the host, which launched these
    """

    op: str
    count: int
    captured_us: float
    replayed_us: float
    captured_host_us: float
    replayed_host_us: float


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
    captured_ms : sum of the calls' times, of the device for those that worked on one
    captured_host_ms, captured_wall_ms : sum of their durations on the host; from the first's start to the last's end
    captured_device_ms : sum of what they kept an accelerator busy; None where the trace does not tell
    unsupported_ms, unsupported_host_ms : of these, what belongs to calls that did not run
    replayed_ms : sum of the calls' times in each timed pass, on an accelerator of passes that its clock timed
    replayed_host_ms, replayed_wall_ms : as in the program, of each pass that the host's clock timed
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
    operators: tuple[OperatorTime, ...]

    @property
    def repeats(self) -> int:
        """Timed passes, without those that a device's clock timed."""
        return len(self.replayed_host_ms)

    @property
    def has_device_times(self) -> bool:
        """Whether some of the times are of a device."""
        return self.captured_device_ms is not None or self.device != "cpu"

    def replayed_quantile_ms(self, share: float) -> float:
        """What this share of the passes stayed under, by the sum of their calls' times."""
        return _quantile(self.replayed_ms, share)

    def host_quantile_ms(self, share: float) -> float:
        """What this share of the passes stayed under, by the sum of their calls' times on the host."""
        return _quantile(self.replayed_host_ms, share)

    def wall_quantile_ms(self, share: float) -> float:
        """What this share of the passes stayed under, from their first call to their last."""
        return _quantile(self.replayed_wall_ms, share)


@dataclass(frozen=True, slots=True)
class Pass:
    """One timed pass: each call's time, and that of the whole."""

    times_ns: list[int]
    wall_ns: int
    peak_bytes: int


def make_result(
    trace: Trace, flow: Flow, parts: Sequence[Part], passes: Sequence[Pass], on_device: Sequence[Pass], device: str
) -> SequenceResult:
    """The result of a sequence whose calls ran as `parts` says, in timed passes.

    Parameters
    ----------
    on_device : the passes that the device's clock timed; none on the CPU
    """
    count = Counter(part.status for part in parts)
    reasons = Counter(
        (call.op, part.status, part.reason)
        for call, part in zip(flow.calls, parts, strict=True)
        if part.status != REPLAYED
    )
    paired = list(zip(flow.calls, parts, strict=True))
    device_ns = trace.own_calls["device_ns"]
    unsupported = [call for call, part in paired if part.status == UNSUPPORTED]
    return SequenceResult(
        device=device,
        calls=len(flow.calls),
        replayed=count[REPLAYED],
        substituted=count[SUBSTITUTED],
        unsupported=count[UNSUPPORTED],
        redrawn=sum(bool(part.redrawn) for part in parts),
        not_replayed=tuple(NotReplayed(*key, number) for key, number in reasons.most_common()),
        captured_ms=sum(call.captured_ns for call in flow.calls) / 1e6,
        captured_host_ms=sum(call.captured_host_ns for call in flow.calls) / 1e6,
        captured_wall_ms=flow.wall_ns / 1e6,
        captured_device_ms=float(device_ns.sum()) / 1e6 if device_ns.notna().any() else None,
        unsupported_ms=sum(call.captured_ns for call in unsupported) / 1e6,
        unsupported_host_ms=sum(call.captured_host_ns for call in unsupported) / 1e6,
        replayed_ms=tuple(sum(one.times_ns) / 1e6 for one in on_device or passes),
        replayed_host_ms=tuple(sum(one.times_ns) / 1e6 for one in passes),
        replayed_wall_ms=tuple(one.wall_ns / 1e6 for one in passes),
        outside_bytes=flow.outside_bytes,
        captured_peak_bytes=flow.peak_bytes,
        replayed_peak_bytes=max((one.peak_bytes for one in passes), default=0),
        operators=tuple(_operators(paired, on_device or passes, passes)),
    )


def from_plain(fields: dict[str, Any]) -> SequenceResult:
    """The result whose fields went through JSON."""
    plain: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    plain["not_replayed"] = tuple(NotReplayed(**item) for item in fields["not_replayed"])
    plain["operators"] = tuple(OperatorTime(**item) for item in fields["operators"])
    return SequenceResult(**plain)


def _operators(
    paired: Sequence[tuple[FlowingCall, Part]], passes: Sequence[Pass], host_passes: Sequence[Pass]
) -> list[OperatorTime]:
    names = list(dict.fromkeys(call.op for call, _ in paired))
    code = {name: index for index, name in enumerate(names)}
    codes = np.array([code[call.op] for call, _ in paired])
    ran = np.array([part.status != UNSUPPORTED for _, part in paired])
    captured = np.array([call.captured_ns for call, _ in paired], dtype=np.float64)
    on_host = np.array([call.captured_host_ns for call, _ in paired], dtype=np.float64)

    def summed(weights: Any) -> Any:
        return np.bincount(codes, weights, minlength=len(names))

    def replayed(passes: Sequence[Pass]) -> Any:
        return np.median([summed(one.times_ns) for one in passes] or [summed(captured * np.nan)], axis=0)

    times = (summed(captured * ran), replayed(passes), summed(on_host * ran), replayed(host_passes))
    table = [
        OperatorTime(name, int(count), *(float(time_ns) / 1e3 for time_ns in own))
        for name, count, *own in zip(names, summed(ran), *times, strict=True)
    ]
    return sorted(table, key=lambda item: -item.captured_us)


def _quantile(values: Sequence[float], share: float) -> float:
    return float(np.quantile(values, share)) if values else float("nan")
