"""The judgement of candidates: wrong calls, a verdict for each signature, and what the step saves."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from math import fsum
from typing import IO, TYPE_CHECKING

from opgrip.cli.terminal import print_line
from opgrip.display.tables import TableColumn, print_table
from opgrip.replay.analyses import UnaskedAnalysis, analyses
from opgrip.replay.cases.selection import FORWARD
from opgrip.replay.modes import CANDIDATE
from opgrip.replay.results.judgement import (
    VERDICTS,
    CandidateColumns,
    JudgedStep,
    counted_signatures,
    judge_rows,
    judged_steps,
)
from opgrip.replay.results.results import RAN, SKIPPED, WRONG, Result

if TYPE_CHECKING:
    from opgrip.replay.run.workload import Workload

MOST_ROWS = 60
"""maximum signatures in the table, worst verdicts first"""
STYLES = {"wrong": "bold red", "failed": "red", "slower": "yellow", "faster": "green"}


@analyses.register("candidates")
class CandidatesAnalysis(UnaskedAnalysis):
    place = 60

    def add_to(self, rows: Sequence[Result]) -> list[Result]:
        workload = self.session.workload
        if not workload.candidates.candidate:
            return list(rows)
        in_trace = workload.source_cases.are_calls
        export = f"opgrip trace export-case {shlex.quote(workload.request.trace)}" if in_trace else ""
        return judge_rows(rows, workload.request.modes.reference, step_us(workload), export)

    def print(self, rows: Sequence[Result], file: IO[str]) -> None:
        print_judgement(rows, file)


def step_us(workload: Workload) -> float | None:
    """Return the captured time of all calls of the trace in us; None for samples and for calls without times."""
    from opgrip.replay.cases.cases import make_cases

    if not workload.source_cases.are_calls:
        return None
    return fsum(case.captured_total_us for case in make_cases(workload.trace)) or None


def print_judgement(rows: Sequence[Result], file: IO[str]) -> None:
    """Print the candidates' rows, worst verdicts first, with the reasons of wrong ones, and a line for each trace."""
    judged = [row for row in rows if CandidateColumns.of(row).verdict is not None]
    if not judged:
        return
    judged.sort(key=lambda row: (VERDICTS.index(_of(row).verdict or ""), -(_of(row).step_share or 0.0)))
    bases = {_key(row): row.median_us for row in rows if row.mode == rows[0].mode}
    columns = [
        TableColumn("verdict", lambda row: _of(row).verdict),
        TableColumn("trace", "trace", least=12, when=lambda row: row.trace),
        TableColumn("operator", _operator, least=20),
        TableColumn("case", "case", "d", rank=3),
        TableColumn("shapes", "shapes", below=True),
        TableColumn("count", "count", ",d", rank=3),
        TableColumn("of step", lambda row: _of(row).step_share, ".2%", rank=2, when=lambda row: _of(row).step_share),
        TableColumn("operator us", lambda row: bases.get(_key(row)), ",.2f", rank=1),
        TableColumn("candidate us", "median_us", ",.2f", rank=1),
        TableColumn("ratio", "ratio", ".3f"),
        TableColumn("95% interval", _interval, ">", rank=1),
    ]
    print_table(columns, judged[:MOST_ROWS], file, style=lambda row: STYLES.get(_of(row).verdict or ""))
    if len(judged) > MOST_ROWS:
        print_line(f"and {len(judged) - MOST_ROWS:,} more signatures: -o FILE writes all", file)
    for row in judged:
        if row.error is not None:
            print_line(f"{_operator(row)} {row.shapes}, case {row.case}: {row.status}: {row.error}", file)
        if (command := _of(row).export) is not None and row.status == WRONG:
            print_line(f"  {command}", file)
    _print_without_gradients(rows, file)
    _print_steps(judged_steps(rows), file)


def _print_without_gradients(rows: Sequence[Result], file: IO[str]) -> None:
    """Print why gradients of candidates were not judged, if the operators have gradients."""
    timed = {_key(row) for row in rows if row.direction != FORWARD and row.status in RAN}
    reasons = Counter(
        row.error for row in rows if row.mode == CANDIDATE and row.status == SKIPPED and _key(row) in timed
    )
    for reason, count in reasons.items():
        print_line(f"gradients {counted_signatures(count)} are not judged: {reason}", file)


def _print_steps(steps: Sequence[JudgedStep], file: IO[str]) -> None:
    for step in steps:
        print_line(f"{step.trace}: {step.line}" if step.trace else step.line, file)
    with_share = [step for step in steps if step.share is not None]
    if len(with_share) > 1:
        saving, share = (
            fsum(values) / len(with_share) for values in zip(*((s.saving, s.share) for s in with_share), strict=True)
        )
        print_line(
            f"mean over {len(with_share)} traces: saves {100 * saving:.2f} % of the step "
            f"(the judged operators take {100 * share:.2f} % of it)",
            file,
        )


def _of(row: Result) -> CandidateColumns:
    return CandidateColumns.of(row)


def _operator(row: Result) -> str:
    return row.op if row.direction == FORWARD else f"{row.op} {row.direction}"


def _interval(row: Result) -> str | None:
    low, high = _of(row).ratio_low, _of(row).ratio_high
    return None if low is None or high is None else f"{low:.3f} to {high:.3f}"


def _key(row: Result) -> tuple[object, ...]:
    return row.identity_without("mode")
