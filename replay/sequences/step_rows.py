"""Result rows of a step replay, one for each signature, and its totals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from opgrip.replay.cases.cases import Case
from opgrip.replay.results.results import CONTENDED, NOISY, RAN, Result
from opgrip.replay.run.workload import Workload, empty_row
from opgrip.replay.sequences.step_options import SequenceColumns
from opgrip.replay.sequences.step_results import SequenceResult, SignatureTimes
from opgrip.replay.timing.timing_options import PROGRAM, SEQUENCE

OF_CAPTURED_TIMES = (
    *("captured_ms", "captured_host_ms", "captured_wall_ms", "unsupported_ms", "unsupported_host_ms"),
    *("critical_calls", "captured_critical_ms", "replayed_critical_ms"),
)
"""totals that are unknown if a trace lacks times"""

QUANTILES = {"ms": 0.5, "p10_ms": 0.1, "p90_ms": 0.9}
"""quantiles over the passes, by the suffix of the totals' names"""


def rows_of(result: SequenceResult, cases: Sequence[Case], workload: Workload) -> list[Result]:
    """Return one row for each case, with the times of all its calls in the step."""
    times_of = {item.signature: item for item in result.signatures}
    return [_row(case, times_of[case.number], workload, result.mode) for case in cases if case.number in times_of]


def totals_of(result: SequenceResult) -> dict[str, Any]:
    """Return the totals for a file of results; unknown and contended times are None."""
    totals = asdict(result)
    del totals["device"], totals["signatures"]
    if not result.has_captured_times:
        totals |= dict.fromkeys(OF_CAPTURED_TIMES)
    quantiles = {
        "replayed": result.replayed_quantile_ms,
        "replayed_host": result.host_quantile_ms,
        "replayed_wall": result.wall_quantile_ms,
    }
    passes = {f"{name}_ms": totals.pop(f"{name}_ms") for name in quantiles}
    for name, quantile_ms in quantiles.items():
        totals |= {f"{name}_{word}": quantile_ms(share) for word, share in QUANTILES.items()}
    if result.is_contended:
        totals |= {f"{name}_{word}": None for name in quantiles for word in QUANTILES} | {"replayed_critical_ms": None}
    totals = {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in totals.items()}
    return {**totals, "passes": passes}


def _row(case: Case, times: SignatureTimes, workload: Workload, mode: str) -> Result:
    way = next(way for way in workload.ways(case) if way.mode == mode)
    row = empty_row(case, way, workload, times.status, None if times.status in RAN else times.reason)
    row = replace(row, method=SEQUENCE, cache=PROGRAM, note=times.note, first_ms=times.first_ms)
    row = replace(row, max_abs=times.max_abs, max_rel=times.max_rel)
    if times.samples:
        row = replace(
            row,
            samples=times.samples,
            median_us=times.median_us,
            p10_us=times.p10_us,
            p90_us=times.p90_us,
            mean_us=times.mean_us,
            spread=times.spread,
            dropped=times.dropped,
            slowed=times.slowed,
            stopped=CONTENDED if times.status == CONTENDED else None,
            noisy=None if times.spread is None else times.spread > NOISY,
            # the dry run compared the results with the recorded ones
            faithful=None if times.substituted or times.not_run else True,
        )
    return row.adding(
        SequenceColumns(times.substituted or None, times.not_run or None, times.redrawn or None, times.host_us)
    )
