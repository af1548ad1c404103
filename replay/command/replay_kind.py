"""Outcomes and reports of replays, for all kinds of replays."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import IO

from opgrip.cli.command import INTERRUPTED, counted, printable
from opgrip.cli.options import flag_of, words_in
from opgrip.cli.progress import Reporter
from opgrip.errors import UserError
from opgrip.replay.analyses import Analysis
from opgrip.replay.cases.cases import Case
from opgrip.replay.cases.selection import BACKWARD, PointOptions, Selection
from opgrip.replay.command.job import ReplayJob, ScoreOptions
from opgrip.replay.inputs.input_options import InputOptions
from opgrip.replay.modes import EAGER, ModeOptions, Tuning
from opgrip.replay.reports import OutputOptions
from opgrip.replay.reports.comparison.comparison import exit_status, hold_candidates, parse_candidate_gate
from opgrip.replay.reports.comparison.results_store import Store, usual_folder
from opgrip.replay.reports.outcome import Results, Scorer, scorers
from opgrip.replay.reports.results_table import list_cases
from opgrip.replay.results.columns import Columns
from opgrip.replay.results.judgement import judged_steps
from opgrip.replay.results.results import CONTENDED, OK, RAN, WRONG, Result, summarize
from opgrip.replay.run.energy import EnergyColumns, EnergyOptions
from opgrip.replay.sequences.accuracy.judge import AccuracyResult
from opgrip.replay.sequences.ranks.replay_ranks import StepOutcome
from opgrip.replay.sequences.step_options import SequenceOptions
from opgrip.replay.sequences.step_results import SequenceResult
from opgrip.replay.timing.timing_options import TimingOptions
from opgrip.replay.workers.executors import EngineOptions, Executor, start_executor


@dataclass(slots=True)
class ReplayOutcome:
    results: Results
    analyses: Sequence[Analysis] = ()
    interrupted: bool = False
    problem: UserError | None = None  # why an analysis failed after the cases had run, or the output was not written
    was_complete: bool = False  # True if the output was already complete
    listed: Sequence[tuple[str, Sequence[Case]]] = ()  # by name of the trace, which is empty for a single trace
    step: SequenceResult | StepOutcome | AccuracyResult | None = None
    problems: Mapping[str, UserError] = field(default_factory=dict)  # why a trace was not replayed, by name
    unmatched: str = ""  # message about the traces in which the options select no case


class Replay:
    """A replay of one kind, such as of several traces, or of the step of one.

    again : command that continues the replay if it is interrupted; empty if it runs for a call from Python
    executor : runs the cases; None to start the one that the options name
    """

    def __init__(self, job: ReplayJob, reporter: Reporter, again: str = "", executor: Executor | None = None) -> None:
        self.job, self.reporter, self.again = job, reporter, again
        self.output = job[OutputOptions]
        self.scorers: Sequence[Scorer] = ()
        self._given_executor = executor

    def executor(self) -> AbstractContextManager[Executor]:
        if self._given_executor is not None:
            return nullcontext(self._given_executor)
        return start_executor(self.job[EngineOptions], self.job[InputOptions].devices, self.job[PointOptions].pin)

    def run(self) -> ReplayOutcome | None:
        """Run the replay and write its output; return None in processes that leave the report to another one."""
        raise NotImplementedError

    def print_results(self, outcome: ReplayOutcome) -> None:
        raise NotImplementedError

    def score_printers(self, baseline: Path | None) -> list[Callable[[Results, IO[str]], None]]:
        if baseline is not None:
            raise UserError("--baseline is for several traces", "name a folder, zoo or zoo:PATTERN")
        return [scorer.print_scores for scorer in self.scorers]

    def details(self, outcome: ReplayOutcome) -> Iterator[str]:
        yield from ()

    def where_interrupted(self, outcome: ReplayOutcome) -> str:
        raise NotImplementedError

    def check_report(self) -> None:
        """Raise `UserError` if the report that the options request cannot be made, before any case runs."""
        self.scorers = list(scorers.values())
        self._gates = [parse_candidate_gate(text) for text in self.output.gate]
        self._printers = self.score_printers(self.job[ScoreOptions].baseline)

    def report(self, outcome: ReplayOutcome) -> int:
        """Print an outcome, and return the exit status of the command."""
        output, say = self.output, self.reporter.say
        if outcome.was_complete:
            say(f"{output.output} is complete: nothing is left to replay")
            return 0
        if output.list:
            for name, cases in outcome.listed:
                if name:
                    print(f"{name}:")
                list_cases(cases, sys.stdout)
            if outcome.unmatched:
                say(outcome.unmatched)
            return 0
        self.print_results(outcome)
        if outcome.problem is not None:
            raise outcome.problem
        if outcome.interrupted:
            hint = f"continue with: {self.again}" if output.output else "only a replay with --output can be continued"
            for line in (*self.details(outcome), f"{self.where_interrupted(outcome)}; {hint}"):
                say(line)
            return INTERRUPTED
        for line in self.closing_lines(outcome):
            say(line)
        held = [hold_candidates(gate, judged_steps(outcome.results)) for gate in self._gates]
        for item in held:
            say(item.line)
        rows = list(outcome.results)
        missing = unfulfilled(self.job, rows)
        for line in (*missing, summarize(rows)):
            say(line)
        if (fidelity := outcome.results.fidelity) is not None:
            say(fidelity.line)
        is_ok = all(row.status in RAN for row in rows) and not outcome.problems
        is_ok &= not (isinstance(outcome.step, SequenceResult) and outcome.step.unsupported)
        is_broken = any(step.broken for step in judged_steps(rows))
        if missing or is_broken or (output.strict and not is_ok):
            return 1
        return exit_status(held)

    def closing_lines(self, outcome: ReplayOutcome) -> Iterator[str]:
        rows = counted(len(outcome.results), "row")
        if self.output.output is not None:
            yield f"wrote {rows} to {self.output.output}"
        if (stored_as := keep(outcome.results, self.output, self.reporter)) is not None:
            yield f"{rows} kept as {stored_as}"
        yield from self.details(outcome)
        if outcome.unmatched:
            yield outcome.unmatched

    def print_scores(self, results: Results) -> None:
        try:
            for print_score in self._printers:
                print_score(results, sys.stdout)
        except UserError as error:
            # the measured rows must not be lost
            self.reporter.say(f"no score: {error}")


def keep(results: Results, output: OutputOptions, reporter: Reporter) -> Path | None:
    folder = output.store or usual_folder()
    if folder is None or not results.rows:
        return None
    try:
        return Store(folder).keep(results.rows, results.header)
    except UserError as error:
        if output.store is not None:
            raise
        reporter.say(f"the results are not stored: {error}")
        return None


WITH_RESULTS = (OK, WRONG, CONTENDED)  # statuses of rows with results


@dataclass(frozen=True, slots=True)
class Request:
    words: str  # the option and its value
    is_of: Callable[[Result], bool]
    absence: str = "no row has this value"  # reason to print if no row fulfils the option


def unfulfilled(job: ReplayJob, rows: Sequence[Result]) -> list[str]:
    """Return a line for each option that no row fulfils, or a single line if there are rows but no case ran."""
    if not any(row.status in WITH_RESULTS for row in rows):
        return [f"no case ran{_why(rows)}"] if rows else []
    lines = []
    for request in _requests(job):
        own = [row for row in rows if request.is_of(row)]
        if not any(row.status in WITH_RESULTS for row in own):
            lines.append(f"nothing ran with {request.words}{_why(own) or f': {request.absence}'}")
    return lines


def _requests(job: ReplayJob) -> Iterator[Request]:
    inputs, points, modes, timing = job[InputOptions], job[PointOptions], job[ModeOptions], job[TimingOptions]
    references = (modes.reference,) if modes.reference != EAGER else ()
    # rows of an accuracy replay are those of the variant
    requested_modes = () if job[SequenceOptions].accuracy else modes.mode
    columns: dict[str, Iterable[object]] = {
        "mode": (*requested_modes, *references),
        "values": inputs.values,
        "threads": points.threads,
        "batch_scale": points.batch_scale,
        "streams": points.streams,
        "cache": timing.cache,
    }
    for name, values in columns.items():
        for value in values:
            yield Request(f"{flag_of(name)} {value}", partial(_has, name, value))
    if timing.backward:
        yield Request("--backward", lambda row: row.direction == BACKWARD, "no case is a forward call")
    if inputs.dtype is not None:
        absence = "no case has a floating-point tensor that can be converted"
        dtype = inputs.dtype
        yield Request(f"--dtype {dtype}", lambda row: row.dtype == dtype or f"{dtype}[" in row.shapes, absence)
    if job[Tuning].trials:
        yield Request("--tune", lambda row: bool(row.tune))
    if job[EnergyOptions].energy:
        yield Request("--energy", partial(_is_seen, EnergyColumns), "the energy of no row was measured")
    for analysis in job.analyses:
        words = words_in(analysis.options)
        if words and analysis.columns is not None:
            yield Request(flag_of(words[0]), partial(_is_seen, analysis.columns), "it added nothing to any row")
    selection = job[Selection]
    is_part = selection.top is not None or job[EngineOptions].shard is not None
    if selection.takes_all and not is_part:
        for pattern in selection.op:
            yield Request(f"--op {pattern}", partial(_matches, pattern), "no case matches it")


def _has(column: str, value: object, row: Result) -> bool:
    return bool(getattr(row, column) == value)


def _matches(pattern: str, row: Result) -> bool:
    return fnmatchcase(row.op, pattern)


def _is_seen(columns: type[Columns], row: Result) -> bool:
    return columns.of(row) != columns()


def _why(rows: Sequence[Result]) -> str:
    reasons = Counter(f"{row.error}" if row.error else row.status for row in rows if row.status not in WITH_RESULTS)
    if not reasons:
        return ""
    reason, count = reasons.most_common(1)[0]
    share = "" if len(reasons) == 1 else f" ({count:,} of {reasons.total():,} rows)"
    return f": {printable(reason)}{share}"
