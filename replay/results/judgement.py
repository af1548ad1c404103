"""Verdicts on candidates (a user's implementations of operators): right, faster or slower than the operator."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from opgrip.replay.cases.selection import FORWARD
from opgrip.replay.modes import CANDIDATE
from opgrip.replay.results.columns import Columns, column
from opgrip.replay.results.paired_ratio import EQUAL, FASTER, SLOWER, UNDECIDED, WITHIN_95, PairedRatio
from opgrip.replay.results.results import FAILED, RAN, SKIPPED, WRONG, Result

VERDICTS = (WRONG, FAILED, SLOWER, UNDECIDED, EQUAL, FASTER)  # verdicts in the order of tables, worst first


@dataclass(frozen=True, slots=True)
class CandidateColumns(Columns):
    verdict: str | None = column(
        "verdict on the candidate: `wrong`, `failed`, `slower`, `faster`, `equal` (within 5 %), `undecided`",
        heading="verdict",
    )
    ratio_low: float | None = column("lower end of the 95 % interval of the candidate's time over the operator's")
    ratio_high: float | None = column("upper end of the 95 % interval of the candidate's time over the operator's")
    step_share: float | None = column("share of the step's captured time that the row's calls take", "1")
    step_saving: float | None = column(
        "share of the step's captured time that the candidate saves in the row's calls; negative if it is slower", "1"
    )
    step_saving_error: float | None = column("half of the 95 % interval of `step_saving`", "1")
    export: str | None = column("command that exports a wrong call as one file")
    labels: str | None = column(
        "JSON: for each label of `record_function` with some of the row's calls, their number and their share of the "
        "captured time of all calls within the label",
        hidden=True,
    )


def judge_rows(
    rows: Sequence[Result],
    reference: str,
    step_us: float | None,
    export: str,
    labels: Mapping[int, Mapping[str, tuple[int, float]]],
) -> list[Result]:
    """Return the rows, with verdicts added to those of candidates.

    reference : mode with which candidates are compared
    step_us : captured time of all calls of the step in us; None if the rows belong to no step
    export : start of the command that exports a case, to which the number of the case is added; empty for none
    labels : by case number and label of `record_function`: number of the case's calls within the label, and the share
        of the label's captured time that they take
    """
    from opgrip.replay.results.ratios import base_place

    judged = list(rows)
    by_case: dict[tuple[object, ...], list[int]] = {}
    for place, row in enumerate(rows):
        by_case.setdefault((row.case_of_trace, row.device, row.dtype), []).append(place)
    for places in by_case.values():
        own = [rows[place] for place in places]
        for place, row in zip(places, own, strict=True):
            if row.mode == CANDIDATE:
                base = base_place(own.index(row), own, reference)
                judged_row = _judged(row, None if base is None else own[base], step_us, export)
                if row.case in labels and row.direction == FORWARD:
                    judged_row = judged_row.adding(
                        replace(CandidateColumns.of(judged_row), labels=json.dumps(labels[row.case]))
                    )
                judged[place] = judged_row
    return judged


def _judged(row: Result, base: Result | None, step_us: float | None, export: str) -> Result:
    if row.status == SKIPPED:
        return row
    share = row.captured_total_us / step_us if step_us and row.direction == FORWARD else None
    if row.status not in RAN:
        verdict = WRONG if row.status == WRONG else FAILED
        command = f"{export} {_words_of(row)} -o case{row.case}.py" if export and row.status == WRONG else None
        return row.adding(CandidateColumns(verdict, step_share=share, export=command))
    ratio = None if base is None or not row.ratio else PairedRatio.of(row)
    if ratio is None:
        return row.adding(CandidateColumns(UNDECIDED, step_share=share))
    saving = error = None
    if share is not None:
        saving, error = share * (1 - ratio.middle), WITHIN_95 * share * ratio.middle * ratio.error
    return row.adding(CandidateColumns(ratio.verdict, *ratio.interval, share, saving, error))


def is_of_module(row: Result) -> bool:
    return bool(row.module) and row.op.split(" ")[0] == row.module


def _words_of(row: Result) -> str:
    return f"{shlex.quote(row.module)} --unit module" if is_of_module(row) else str(row.case)


def is_slower_by(row: Result, limit: float) -> bool:
    return CandidateColumns.of(row).verdict == SLOWER and (row.ratio_p50 or 0.0) > limit


def may_be_slower_by(row: Result, limit: float) -> bool:
    """Return True if a row is undecided and its 95 % interval reaches above `limit`."""
    judged = CandidateColumns.of(row)
    return judged.verdict == UNDECIDED and (judged.ratio_high is None or judged.ratio_high > limit)
