"""The analysis that judges candidates."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import fsum
from operator import eq
from typing import IO, TYPE_CHECKING

from opgrip.cli.command import counted
from opgrip.cli.terminal import print_line
from opgrip.display.tables import TableColumn, print_table
from opgrip.replay.analyses import UnaskedAnalysis, analyses
from opgrip.replay.analyses.roofline import LimitColumns, ceilings_of, dtype_of, threads_of, with_limits
from opgrip.replay.cases.selection import FORWARD
from opgrip.replay.modes import CANDIDATE
from opgrip.replay.results.judgement import (
    VERDICTS,
    CandidateColumns,
    JudgedStep,
    is_of_module,
    judge_rows,
    judged_steps,
    saving_lines,
    summary_lines,
)
from opgrip.replay.results.results import IMPOSSIBLE, RAN, SKIPPED, WRONG, Result

if TYPE_CHECKING:
    from opgrip.platform.peaks import Peaks
    from opgrip.replay.cases.cases import Case
    from opgrip.replay.run.workload import Workload

MOST_ROWS = 60  # maximum number of signatures in the table, worst verdicts first
# maximum number of labels of `record_function` by which savings are printed, those opened most often first
MOST_LABELS = 20
FAR_BELOW = 0.5  # share of the machine's limit below which a time is impossible; the limit is measured, with an error
STYLES = {"wrong": "bold red", "failed": "red", "slower": "yellow", "faster": "green"}


@analyses.register("candidates")
class CandidatesAnalysis(UnaskedAnalysis):
    order = 60

    def add_to(self, rows: Sequence[Result]) -> list[Result]:
        workload = self.session.workload
        if not workload.request.candidates.candidate:
            return list(rows)
        # loads torch, which `--help` must not
        from opgrip.platform.peaks import read_cached_peaks
        from opgrip.replay.cases.cases import make_cases

        are_modules = bool(workload.request.candidates.modules)
        in_trace = workload.source_cases.are_calls or are_modules
        export = f"opgrip trace export-case {shlex.quote(workload.request.trace)}" if in_trace else ""
        is_untrusted = workload.request.candidates.untrusted
        ceilings = ceilings_of(self.session) if is_untrusted else read_cached_peaks(self.session.device)
        if ceilings is not None:
            rows = held_to_limits(rows, ceilings, workload)
        cases = make_cases(workload.trace) if in_trace else []
        step_us = fsum(case.captured_total_us for case in cases) or None
        # the calls of modules are not counted by label
        labels = shares_in_labels(workload, cases) if step_us and not are_modules else {}
        return judge_rows(rows, workload.request.modes.reference, step_us, export, labels)

    def print(self, rows: Sequence[Result], file: IO[str]) -> None:
        print_judgement(rows, file)


def held_to_limits(rows: Sequence[Result], ceilings: Peaks, workload: Workload) -> list[Result]:
    """Mark candidates that are far faster than the machine: untrusted ones as wrong, others as doubtful."""
    limited = with_limits(rows, ceilings, threads_of(workload), dtype_of(workload), launches=False)
    return [
        _held(row, LimitColumns.of(other).limit_us or 0.0, workload) for row, other in zip(rows, limited, strict=True)
    ]


def _held(row: Result, limit_us: float, workload: Workload) -> Result:
    if row.mode != CANDIDATE or row.status not in RAN or (row.median_us or 0.0) >= FAR_BELOW * limit_us:
        return row
    reason = f"takes {row.median_us:.3g} us, but this machine needs {limit_us:.3g} us"
    if workload.request.candidates.untrusted:
        return replace(row, status=WRONG, error=reason)
    reason += ": the candidate leaves work out, or the bytes and operations of this call are counted wrongly"
    doubts, note = (", ".join(filter(None, pair)) for pair in ((row.doubts, IMPOSSIBLE), (row.note, reason)))
    return replace(row, doubts=doubts, note=note)


def shares_in_labels(workload: Workload, cases: Sequence[Case]) -> dict[int, dict[str, tuple[int, float]]]:
    """Return how many of each case's calls are within each label, and their share of the label's captured time."""
    trace = workload.trace
    captured_us = {case.trace_number: case.captured_us for case in cases}
    shares: dict[int, dict[str, tuple[int, float]]] = {}
    labels = list(trace.labels.index[:MOST_LABELS])
    if not labels:
        # a table of all calls need not be made
        return shares
    own = trace.own_calls["signature"]
    for label in labels:
        inside = trace.within_labels(partial(eq, label))
        counts = Counter(own[inside.reindex(own.index)].tolist())
        total_us = fsum(count * captured_us.get(number, 0.0) for number, count in counts.items())
        for case in workload.cases:
            if total_us and (count := counts.get(case.trace_number)):
                share = count * captured_us[case.trace_number] / total_us
                shares.setdefault(case.number, {})[str(label)] = (count, share)
    return shares


def print_judgement(rows: Sequence[Result], file: IO[str]) -> None:
    judged = [row for row in rows if CandidateColumns.of(row).verdict is not None]
    if not judged:
        return
    judged.sort(
        key=lambda row: (
            VERDICTS.index(CandidateColumns.of(row).verdict or ""),
            -(CandidateColumns.of(row).step_share or 0.0),
        )
    )
    bases = {_key(row): row.median_us for row in rows if row.mode == rows[0].mode}
    what = "module" if is_of_module(judged[0]) else "operator"
    columns = [
        TableColumn("verdict", lambda row: CandidateColumns.of(row).verdict),
        TableColumn("trace", "trace", least=12, when=lambda row: row.trace),
        TableColumn(what, _operator, least=20),
        TableColumn("case", "case", "d", rank=3),
        TableColumn("shapes", "shapes", below=True),
        TableColumn("count", "count", ",d", rank=3),
        TableColumn(
            "of step",
            lambda row: CandidateColumns.of(row).step_share,
            ".2%",
            rank=2,
            when=lambda row: CandidateColumns.of(row).step_share,
        ),
        TableColumn(f"{what} us", lambda row: bases.get(_key(row)), ",.2f", rank=1),
        TableColumn("candidate us", "median_us", ",.2f", rank=1),
        TableColumn("ratio", "ratio_p50", ".3f"),
        TableColumn("95% interval", _interval, ">", rank=1),
    ]
    print_table(columns, judged[:MOST_ROWS], file, style=lambda row: STYLES.get(CandidateColumns.of(row).verdict or ""))
    if len(judged) > MOST_ROWS:
        print_line(f"and {len(judged) - MOST_ROWS:,} more signatures: -o FILE writes all of them", file)
    undecided: dict[str, list[str]] = {}
    for row in judged:
        if (reason := CandidateColumns.of(row).undecided_because) is not None:
            undecided.setdefault(reason, []).append(str(row.case))
    for reason, numbers in undecided.items():
        print_line(f"undecided on case {', '.join(numbers)}: {reason}", file)
    for row in judged:
        if IMPOSSIBLE in row.doubts:
            print_line(f"{_operator(row)} {row.shapes}, case {row.case}: {IMPOSSIBLE}: {row.note}", file)
        if row.error is not None:
            print_line(f"{_operator(row)} {row.shapes}, case {row.case}: {row.status}: {row.error}", file)
        if (command := CandidateColumns.of(row).export) is not None and row.status == WRONG:
            print_line(f"  {command}", file)
    _print_without_gradients(rows, file)
    _print_steps(judged_steps(rows), file)


def _print_without_gradients(rows: Sequence[Result], file: IO[str]) -> None:
    timed = {_key(row) for row in rows if row.direction != FORWARD and row.status in RAN}
    reasons = Counter(
        row.error for row in rows if row.mode == CANDIDATE and row.status == SKIPPED and _key(row) in timed
    )
    for reason, count in reasons.items():
        print_line(f"gradients of {counted(count, 'signature')} are not judged: {reason}", file)


def _print_steps(steps: Sequence[JudgedStep], file: IO[str]) -> None:
    lines = saving_lines(steps)
    if lines:
        columns = [
            TableColumn("trace", "trace", least=16, when=lambda line: line.trace),
            TableColumn("part", "part", when=lambda line: line.part),
            TableColumn(f"{steps[0].what}s take", "share", ".2%"),
            TableColumn("saves", "saving", ".2%"),
            TableColumn("±", "error", ".2%"),
            TableColumn("signatures", "signatures", ",d", when=lambda line: line.signatures),
            TableColumn("slower", "slower", ",d", when=lambda line: line.signatures),
            TableColumn("broken", "broken", ",d", when=lambda line: line.signatures),
        ]
        print_table(columns, lines, file)
    for line in summary_lines(steps):
        print_line(line, file)


def _operator(row: Result) -> str:
    return row.op if row.direction == FORWARD else f"{row.op} {row.direction}"


def _interval(row: Result) -> str | None:
    low, high = CandidateColumns.of(row).ratio_low, CandidateColumns.of(row).ratio_high
    return None if low is None or high is None else f"{low:.3f} to {high:.3f}"


def _key(row: Result) -> tuple[object, ...]:
    return row.identity_without("mode")
