"""Result columns, rows and totals of an accuracy replay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from opgrip.cli.command import counted
from opgrip.replay.results.columns import Columns, column
from opgrip.replay.results.results import OK, UNSUPPORTED, WRONG, Result
from opgrip.replay.timing.timing_options import SEQUENCE

if TYPE_CHECKING:
    from opgrip.replay.run.workload import Workload
    from opgrip.replay.sequences.accuracy.judge import AccuracyResult, CallError


@dataclass(frozen=True, slots=True)
class AccuracyColumns(Columns):
    local_units: float | None = column(
        "largest error of the calls on the reference's inputs, in units in the last place", heading="local units"
    )
    accumulated_error: float | None = column(
        "largest relative error of the calls' results on the variant's own inputs", heading="accumulated"
    )
    magnification: float | None = column(
        "largest ratio of a call's relative error to that of its inputs, on the variant's own inputs",
        heading="magnified",
    )


def rows_of_judged(judged: AccuracyResult, workload: Workload) -> list[Result]:
    calls_of: dict[int, list[CallError]] = {}
    for call in judged.calls:
        calls_of.setdefault(call.signature, []).append(call)
    return list(_rows(judged, calls_of, workload))


def _rows(judged: AccuracyResult, calls_of: dict[int, list[CallError]], workload: Workload) -> Iterator[Result]:
    # this module is imported to print the help
    from opgrip.replay.run.workload import empty_row

    for case in workload.cases:
        calls = calls_of.get(case.number, [])
        mode = workload.request.modes.mode[-1]
        variant = next(variant for variant in workload.variants(case) if variant.mode == mode)
        reason = judged.reasons.get(case.number)
        wrong = [call for call in calls if call.is_local]
        status, error = (OK, None) if calls and reason is None else (UNSUPPORTED, reason or "it did not run")
        if wrong:
            status, error = WRONG, f"rounding does not explain the results of {counted(len(wrong), 'call')}"
        row = replace(empty_row(case, variant, workload, status, error), method=SEQUENCE)
        if calls:
            magnified = [call.magnification for call in calls if call.magnification is not None]
            largest = max(call.units for call in calls), max(call.accumulated for call in calls)
            row = row.adding(AccuracyColumns(*largest, max(magnified, default=None)))
        yield row


def totals_of_judged(judged: AccuracyResult) -> dict[str, Any]:
    """Return the errors as plain data, with the calls that have any."""
    totals = asdict(judged)
    totals["calls"] = [asdict(call) for call in judged.calls if call.units or call.accumulated or call.rejoined]
    totals["reasons"] = [{"reason": reason, "signatures": n} for reason, n in Counter(judged.reasons.values()).items()]
    for name in ("first_beyond", "first_lost"):
        call = getattr(judged, name)
        totals[name] = None if call is None else call.index
    return totals
