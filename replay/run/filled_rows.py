"""Result rows with what a run, a check or a measurement of their case found."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from opgrip.replay.cases.selection import Variant
from opgrip.replay.checks.verdicts import ResultVerdict, joined
from opgrip.replay.modes import Program
from opgrip.replay.operators.memory import CallMemory
from opgrip.replay.operators.work import Work
from opgrip.replay.results.paired_ratio import PairedColumns, paired_ratio
from opgrip.replay.results.results import CONTENDED, NOISY, WRONG, Result, rate_of
from opgrip.replay.run.energy import Energy
from opgrip.replay.run.workload import Workload
from opgrip.replay.timing.samples import Samples
from opgrip.replay.timing.timed_functions import TimedFunction, paired_runs

DECIMALS = 4  # number of decimals of single run times in us


def with_memory_columns(result: Result, memory: CallMemory) -> Result:
    return replace(result, allocated_bytes=memory.allocated, peak_bytes=memory.peak, reserved_bytes=memory.reserved)


def with_program_note(result: Result, program: Program, first_ms: float) -> Result:
    """Return a row with its program's note and first-call time, unless it was compiled ahead and already has them."""
    return replace(result, note=program.note, first_ms=first_ms) if result.first_ms is None else result


def with_work(result: Result, work: Work | None) -> Result:
    if work is None:
        return result
    return replace(result, flops=work.flops, bytes_moved=work.bytes, math_dtype=work.dtype, operators=work.operators)


def with_verdict(result: Result, verdicts: Sequence[ResultVerdict]) -> Result:
    if not verdicts:
        return result
    verdict = joined(verdicts)
    notes = dict.fromkeys(note for note in (result.note, *verdict.notes) if note)
    result = replace(result, max_abs=verdict.max_abs, max_rel=verdict.max_rel, note=", ".join(notes))
    return result if verdict.right else replace(result, status=WRONG, error=verdict.reason)


def with_energy(row: Result, energy: Energy | None) -> Result:
    if energy is None:
        return row
    clock_mhz = row.clock_mhz if energy.clock_mhz is None else energy.clock_mhz
    return replace(row, clock_mhz=clock_mhz, throttled=", ".join(energy.throttled) or None).adding(energy.columns)


def with_times(result: Result, samples: Samples, workload: Workload, variant: Variant) -> Result:
    # the spread is infinite if no kind of run was repeated
    spread = measured_spread if math.isfinite(measured_spread := samples.spread) else None
    median_us = samples.quantile_us(0.5)
    return replace(
        result,
        status=CONTENDED if samples.is_contended else result.status,
        median_us=median_us,
        p10_us=samples.percentile_us(0.1),
        p90_us=samples.percentile_us(0.9),
        mean_us=samples.mean_us,
        gflop_per_s=None if samples.is_contended else rate_of(result.flops, median_us),
        gb_per_s=None if samples.is_contended else rate_of(result.bytes_moved, median_us),
        samples=len(samples),
        runs=samples.effective_runs,
        spread=spread,
        stopped="contended" if samples.is_contended else samples.done(workload.request.effort) or "most",
        dropped=samples.dropped,
        slowed=samples.slowed / len(samples) if len(samples) else None,
        noisy=None if spread is None else spread > NOISY,
        method=workload.timing.exec_mode,
        cache=workload.cache_of(variant),
        times_us=[round(time_ns / 1e3, DECIMALS) for time_ns in samples.in_order],
        weights=samples.weights,
        memory_gb_per_s=samples.memory_gb_per_s,
    )


def with_pairs(row: Result, function: TimedFunction, other: TimedFunction, base_us: float) -> Result:
    """Return a row with the ratios of its function's times to another function's in the same rounds.

    base_us : median time of the other function in us
    """
    are_exchanged = function.exchanges is not None and function.exchanges == other.exchanges
    pairs = paired_runs(function.runs, other.runs)
    times = ((run.arrangement, run.time_ns, other.time_ns) for run, other in pairs)
    ratio = paired_ratio(times, base_us, are_exchanged)
    if ratio is None:
        return row
    row = replace(row, ratio_p10=ratio.low, ratio_p50=ratio.middle, ratio_p90=ratio.high)
    return row.adding(PairedColumns(ratio.error, ratio.chance))
