"""Replay of one trace, of samples or of operators: runs the cases, adds columns of analyses, and writes the output."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from datetime import datetime, timezone
from itertools import count
from pathlib import Path
from typing import Any

import torch

from opgrip.cli.command import counted, printable
from opgrip.cli.progress import Reporter, SilentReporter
from opgrip.errors import UserError
from opgrip.platform.machine import available_memory, describe_processors
from opgrip.replay.analyses import Analysis, AnalysisSession
from opgrip.replay.cases.selection import Selection
from opgrip.replay.cases.sources import source_of
from opgrip.replay.command.job import ReplayJob
from opgrip.replay.command.replay_kind import Replay, ReplayOutcome
from opgrip.replay.command.run_requests import check_output, request_of
from opgrip.replay.inputs.input_options import InputOptions
from opgrip.replay.modes import EAGER
from opgrip.replay.operators.admission import absent_extensions
from opgrip.replay.operators.devices import check_present, is_accelerator, name_of, use_device, with_index
from opgrip.replay.reports import OutputOptions
from opgrip.replay.reports.accuracy_report import MOST_ERRORS, print_accuracy
from opgrip.replay.reports.cells import OPTIONS, read_completed
from opgrip.replay.reports.comparison.comparison import advice, compare, summary
from opgrip.replay.reports.comparison.results_store import Store, join_repeats
from opgrip.replay.reports.fidelity import HERE, with_doubts
from opgrip.replay.reports.outcome import Results, is_completed, write_results
from opgrip.replay.reports.results_table import OF_THESE, print_results
from opgrip.replay.reports.step_report import ROWS, print_ranks, print_sequence
from opgrip.replay.results.judgement import judged_steps
from opgrip.replay.results.origins import Origin, this_machine
from opgrip.replay.results.ratios import with_divided_launches, with_ratios
from opgrip.replay.results.results import RAN, SETTINGS, Result
from opgrip.replay.run.measure import CachedRows
from opgrip.replay.run.request import identity, options_hash
from opgrip.replay.run.untrusted import unconfined
from opgrip.replay.run.worker import LocalExecutor
from opgrip.replay.run.workload import cost_us, expected_rows, load_workload, recorded_device
from opgrip.replay.sequences.accuracy.judge import AccuracyResult, judge_apart
from opgrip.replay.sequences.accuracy.rows import rows_of_judged, totals_of_judged
from opgrip.replay.sequences.ranks.control import Control
from opgrip.replay.sequences.ranks.plan import own_file
from opgrip.replay.sequences.ranks.replay_ranks import StepOutcome, replay_ranks
from opgrip.replay.sequences.step_options import RankLaunch, RankOptions, rows_of, totals_of
from opgrip.replay.sequences.step_replay import confirm, replay_apart
from opgrip.replay.sequences.step_results import SequenceResult
from opgrip.replay.workers.executors import Executor
from opgrip.replay.workers.journal import MACHINE_KIND, ReplayJournal, journal_path
from opgrip.traces.table.call_table import COUNT
from opgrip.traces.zoo.manifest import FIELD

LONG_S = 30  # expected time in s of a replay above which it is reported at the start
MOST_REPEATS = 20  # maximum number of repeats of a case for which it is undecided whether it differs from another run

RowsByCase = dict[int, list[Result]]
# function that replays the cases with given numbers; the text describes the repeat
RunOnce = Callable[[Collection[int], str], RowsByCase]


class OneTrace(Replay):
    """The replay of the cases of one trace, of samples or of operators.

    may_fork : True if this process has not used torch yet, so that it can be forked
    origin, journal : the trace, and where its rows are kept, if it is one of several
    """

    def __init__(
        self,
        job: ReplayJob,
        reporter: Reporter,
        may_fork: bool = True,
        again: str = "",
        executor: Executor | None = None,
        origin: Origin | None = None,
        journal: ReplayJournal | None = None,
    ) -> None:
        super().__init__(job, reporter, again, executor)
        self._may_fork, self._origin, self._journal = may_fork, origin, journal
        self._began = datetime.now(timezone.utc)
        self._base: Results | None = None
        self.stored_cases = 0

    def run(self) -> ReplayOutcome | None:
        is_complete = is_completed(self.output)
        with self.executor() as executor:
            self.load(executor)
            if is_complete:
                results = Results(self._completed_rows(), {"trace": self.workload.request.trace})
                return ReplayOutcome(results, was_complete=True)
            if self.output.list:
                return ReplayOutcome(Results([], {}), listed=[("", self.workload.cases)])
            return self.run_loaded()

    def load(self, executor: Executor) -> None:
        """Load the trace and select the cases."""
        output = self.output
        if output.until_decided is not None:
            base = Results.load(Store(output.store).find(output.until_decided))
            own = [row for row in base if self._origin is None or row.trace == self._origin.trace]
            self._base = Results(own, base.header)
        check_output(self.job)
        request = request_of(self.job)
        with self.reporter.reading(request.trace):
            workload = load_workload(request)
        unsafe = unconfined() if request.candidates.untrusted else None
        absent = absent_extensions(request.inputs.extension)
        for note in filter(None, (*workload.notes, unsafe, *request.points.notes, *absent)):
            self.reporter.say(note)
        executor.check(workload)
        request.timing.check_device(workload.device)
        limits = request.limits
        if executor.runs_here and not is_accelerator(workload.device):
            limits = replace(limits, memory_limit=limits.memory_limit or available_memory(workload.device))
        self._executor, self.workload = executor, workload.with_request(limits=limits)

    @property
    def header(self) -> dict[str, Any]:
        """Header of the results; reading it may initialize the device."""
        workload, request, about_executor = self.workload, self.workload.request, self._executor.about(self.workload)
        header = {
            "trace": request.trace,
            "torch": torch.__version__,
            "device": about_executor["device"],
            "seed": request.inputs.seed,
        }
        if request.shard is not None:
            header["shard"] = str(request.shard)
        about = {
            "time": self._began.isoformat(timespec="seconds"),
            "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
            "trace_hash": source_of(request.trace).fingerprint(request.trace),
            OPTIONS: options_hash(request),
        }
        distilled = workload.trace.header.get(FIELD)
        stands_for = {FIELD: distilled} if isinstance(distilled, dict) else {}
        settings = self.job.settings
        return header | about | about_executor | stands_for | ({SETTINGS: settings} if settings else {})

    def _completed_rows(self) -> list[Result]:
        assert self.output.output is not None, "an earlier replay wrote it"
        workload = self.workload
        expected = expected_rows(workload.cases, workload)
        return read_completed(self.output.output, expected, workload.devices, workload.timing.caches, self.header)

    def run_loaded(self) -> ReplayOutcome:
        output, path = self.output, self.output.output
        for scorer in self.scorers:
            scorer.check(self.workload.trace.header)
        requested = self._requested_analyses()
        earlier = list(Results.load(path)) if output.append and path is not None and path.exists() else []
        try:
            rows, interrupted = self._run_cases()
            rows = with_divided_launches(rows, self.workload.cases, self.workload.trace)
        except UserError:
            self._report_stored()
            raise
        # only now, when no worker needs the device: reading the header creates a context
        header = self.header
        if self._is_captured_here():
            rows, header[HERE] = with_doubts(rows, self.workload.cases, self.workload.trace), True
        outcome = ReplayOutcome(Results(rows, header))
        if interrupted:
            outcome.interrupted, outcome.analyses = True, [item for item in requested if item.prints_partial]
            return outcome
        try:
            for analysis in requested:
                results = outcome.results
                rows = analysis.add_to(results.rows)
                outcome.results = Results(rows, results.header | analysis.header)
        except UserError as error:
            outcome.problem = error
            self._report_stored()
            return outcome
        outcome.analyses = requested
        if self.workload.request.candidates.confirm:
            outcome.results = Results(rows, outcome.results.header | self._confirmed(rows))
        if path is not None:
            try:
                everything = [*earlier, *_renumbered(rows, earlier)]
                write_results(everything, outcome.results.header, path, output.may_replace)
            except UserError as error:
                outcome.problem = error
                self._report_stored()
            else:
                if all(analysis.saw_all for analysis in requested):
                    for analysis in requested:
                        analysis.finish()
                    journal_path(path).unlink(missing_ok=True)
        return outcome

    def _is_captured_here(self) -> bool:
        workload = self.workload
        request, header = workload.request, workload.trace.header
        is_of_others = {FIELD, "processes", "converted_from"} & header.keys() or header.get("world_size", 1) != 1
        is_called = workload.source_cases.are_calls and not request.candidates.candidate
        if is_of_others or not is_called or not self._executor.runs_here:
            return False
        # a trace does not name its machine: one with the same processors, accelerator and torch counts as it
        recorded, devices = recorded_device(workload.trace), header.get("devices")
        present = {"cpu": describe_processors()}
        if is_accelerator(recorded) or is_accelerator(workload.device):
            present[with_index(recorded)] = name_of(workload.device)
        threads = [count for case in workload.cases if type(count := case.context.get("threads")) is int]
        return (
            isinstance(devices, dict)
            and torch.device(recorded).type == torch.device(workload.device).type
            and present.items() <= devices.items()
            and header.get("torch") == torch.__version__
            and max(threads, default=1) <= len(request.points.pin or os.sched_getaffinity(0))
        )

    def _confirmed(self, rows: Sequence[Result]) -> dict[str, Any]:
        judged = next((step for step in judged_steps(rows) if step.share is not None), None)
        with self.reporter.following("replaying the whole step") as on_progress:
            confirmation = confirm(self.workload, judged, on_progress)
        name = "" if self._origin is None else f"{self._origin.trace}: "
        # Python programs read it from the header
        self.reporter.begin(f"{name}{confirmation.line}")
        return {"confirmation": asdict(confirmation)}

    def _requested_analyses(self) -> list[Analysis]:
        output = self.output
        context = AnalysisSession(
            self.workload, output.output, output.may_replace, output.resume, self.reporter, self._may_fork
        )
        return [analysis(self.job.options[analysis.options], context) for analysis in self.job.analyses]

    def _run_cases(self) -> tuple[list[Result], bool]:
        workload = self.workload
        with self._own_journal() as journal:
            rows = {} if journal is None else journal.measured("" if self._origin is None else self._origin.trace)
            self.stored_cases = len(rows)
            compiled = self._executor.compile(workload, rows, self.reporter, self._may_fork)
            remaining = counted(len(workload.cases) - len(rows), "case")
            doing = f"replaying {remaining} on {', '.join(workload.devices)}"
            count_of_rows = sum(len(workload.variants(case)) for case in workload.cases)
            costs_us = (cost_us(case, workload, count_of_rows) for case in workload.cases if case.number not in rows)
            seconds = sum(costs_us) / 1e6 / len(workload.devices)
            doing += f", in about {seconds:,.0f} s" if seconds > LONG_S else ""
            try:
                for case_rows in self.rows(set(rows), compiled, doing):
                    if journal is not None:
                        journal.add(case_rows)
                        self.stored_cases += 1
                    rows[case_rows[0].case] = case_rows
            except KeyboardInterrupt:
                return self._in_order(rows), True
        numbers = {case.number for case in workload.cases}

        def run_again(chosen: Collection[int], which: str) -> RowsByCase:
            doing = f"{which}: {counted(len(chosen), 'case')}"
            return {new[0].case: new for new in self.rows(numbers - {*chosen}, compiled, doing)}

        request = workload.request
        try:
            rows = repeat(rows, run_again, request.effort.repeats, self._base, request.modes.reference)
        except KeyboardInterrupt:
            return self._in_order(rows), True
        if self._base is not None:
            comparison = compare(self._base, Results(self._in_order(rows), {}))
            for line in (f"against {self.output.until_decided}: {summary(comparison)}", *advice(comparison)):
                self.reporter.say(line)
        return self._in_order(rows), False

    def _own_journal(self) -> AbstractContextManager[ReplayJournal | None]:
        output = self.output
        if output.output is None:
            return nullcontext(self._journal)
        kind = self._executor.machine_kind(self.workload)
        same = {**identity(self.workload.request), MACHINE_KIND: kind}
        return ReplayJournal(output.output, same, output.resume, output.force or output.append)

    def rows(self, done: Collection[int], compiled: CachedRows, doing: str) -> Iterator[list[Result]]:
        workload, not_ok = self.workload, 0
        # workers on other machines add the machine to each row
        marks = self._executor.runs_here and workload.request.shard is not None
        machine = this_machine(workload.device) if marks else None
        with self.reporter.doing(doing, len(workload.cases) - len(done)) as advance:
            for rows in self._executor.run(workload, done, compiled, self._may_fork):
                if machine is not None:
                    rows = [machine.marked(row) for row in rows]
                if self._origin is not None:
                    rows = [self._origin.marked(row) for row in rows]
                not_ok += any(row.status not in RAN for row in rows)
                yield rows
                advance(f"{f'{not_ok} not ok, ' if not_ok else ''}{printable(rows[0].op)}")

    def _report_stored(self) -> None:
        if self.again and self.output.output is not None and self.stored_cases:
            cases = f"{self.stored_cases} of {counted(len(self.workload.cases), 'case')}"
            self.reporter.say(f"{cases} are in {journal_path(self.output.output)}; continue with: {self.again}")

    def _in_order(self, rows: RowsByCase) -> list[Result]:
        return [row for case in self.workload.cases for row in rows.get(case.number, [])]

    def print_results(self, outcome: ReplayOutcome) -> None:
        rows = list(outcome.results)
        # an analysis prints the rows of candidates with their verdicts
        if not judged_steps(rows) and (rows or not outcome.interrupted):
            print_results(rows, sys.stdout, OF_THESE if self.job[Selection].selects_some else "share")
        if outcome.problem is None:
            for analysis in outcome.analyses:
                analysis.print(rows, sys.stdout)
            self.print_scores(outcome.results)

    def details(self, outcome: ReplayOutcome) -> Iterator[str]:
        for row in outcome.results:
            if row.detail is not None:
                yield f"{row.op} {row.mode}:\n{row.detail.rstrip()}"

    def where_interrupted(self, outcome: ReplayOutcome) -> str:
        done = len({row.case for row in outcome.results})
        return f"interrupted after {done} of {counted(len(self.workload.cases), 'case')}"


def _renumbered(rows: Sequence[Result], earlier: Sequence[Result]) -> list[Result]:
    own = {(row.case, row.key) for row in earlier}
    used, number_of_key = {case for case, _ in own}, {key: case for case, key in own}
    unused = count(max([-1, *used, *(row.case for row in rows)]) + 1)

    def number_of(row: Result) -> int:
        is_own = row.case not in used or (row.case, row.key) in own
        return row.case if is_own else number_of_key.setdefault(row.key, next(unused))

    return [replace(row, case=number_of(row)) for row in rows]


def repeat(
    first: Mapping[int, list[Result]], run_once: RunOnce, repeats: int, base: Results | None, reference: str = EAGER
) -> RowsByCase:
    """Replay cases again, and return rows by case number that combine all replays of a case."""
    joined = {number: list(rows) for number, rows in first.items()}
    for time in count(2):
        if time <= repeats:
            chosen, which = set(joined), f"repeat {time} of {repeats}"
        elif base is not None and time <= MOST_REPEATS:
            chosen, which = _undecided(base, joined), f"repeat {time}"
        else:
            break
        if not chosen:
            break
        for number, new in run_once(chosen, which).items():
            both = [join_repeats([before, row]) for before, row in zip(joined[number], new, strict=True)]
            joined[number] = with_ratios(both, reference)
    return joined


def _undecided(base: Results, rows: RowsByCase) -> set[int]:
    comparison = compare(base, Results([row for case_rows in rows.values() for row in case_rows], {}))
    # the base does not change, so repeats cannot decide a case that the base ran only once
    return {pair.new.case for pair in comparison.pairs if pair.more_new_runs is not None}


class Step(OneTrace):
    """The replay of all calls of a step in their recorded order."""

    def run_loaded(self) -> ReplayOutcome:
        workload = self.workload
        doing = f"replaying {counted(len(workload.trace.own_calls), 'call')} in their order on {workload.device}"
        with self.reporter.following(doing) as on_progress:
            step = replay_apart(workload, on_progress, self._may_fork)
        return self._written(rows_of(step, workload.cases, workload), {"sequence": totals_of(step)}, step)

    def _written(
        self, rows: Sequence[Result], totals: dict[str, Any], step: SequenceResult | StepOutcome | AccuracyResult
    ) -> ReplayOutcome:
        results = Results(rows, self.header | totals)
        if self.output.output is not None:
            write_results(results.rows, results.header, self.output.output, self.output.may_replace)
        return ReplayOutcome(results, step=step)

    def print_results(self, outcome: ReplayOutcome) -> None:
        top = self.job[Selection].top or ROWS
        if isinstance(outcome.step, SequenceResult):
            print_sequence(outcome.step, list(outcome.results), top, sys.stdout)
        elif isinstance(outcome.step, StepOutcome):
            print_ranks(outcome.step, top, sys.stdout)

    def details(self, outcome: ReplayOutcome) -> Iterator[str]:
        yield from ()


class Accuracy(Step):
    """The comparison of a step with a variant of it."""

    def run_loaded(self) -> ReplayOutcome:
        workload = self.workload
        doing = f"comparing {counted(len(workload.trace.own_calls), 'call')} on {workload.device}"
        with self.reporter.following(doing) as on_progress:
            judged = judge_apart(workload, on_progress, self._may_fork)
        return self._written(rows_of_judged(judged, workload), {"accuracy": totals_of_judged(judged)}, judged)

    def print_results(self, outcome: ReplayOutcome) -> None:
        assert isinstance(outcome.step, AccuracyResult), "it comes from `run_loaded`"
        request = self.workload.request
        mode, dtype = request.modes.mode[-1], request.inputs.dtype

        def mode_of(op: str) -> str:
            candidate = request.candidates.find(op)
            if candidate is not None:
                return f"candidate:{candidate.source}:{candidate.function}"
            return mode if mode.startswith("compile") else dtype or ""

        top = self.job[Selection].top or MOST_ERRORS
        print_accuracy(outcome.step, top, sys.stdout, request.trace, mode_of)


class Ranks(Step):
    """The replay of the step of one rank, with the other ranks in other processes of a launcher."""

    def __init__(self, job: ReplayJob, reporter: Reporter, launch: RankLaunch) -> None:
        super().__init__(job, reporter, may_fork=False, executor=LocalExecutor())
        self._launch = launch

    def run(self) -> ReplayOutcome | None:
        options = self.job[RankOptions]
        with Control(self._launch, options.collective_timeout) as control, self.executor() as executor:
            if not control.is_first:
                self.job = self.job.having(OutputOptions, output=None, store=None)
                self.output, self.reporter = self.job[OutputOptions], SilentReporter("opreplay")
            control.together(lambda: self._load_own(executor))
            workload = self.workload
            calls = counted(int(workload.trace.own_distinct_calls[COUNT].sum()), "call")
            doing = f"replaying {calls} of {counted(control.launch.world_size, 'rank')} on {workload.device}"
            with self.reporter.following(doing) as on_progress:
                step = replay_ranks(workload, options, control, on_progress)
            return None if step is None else self._written(step.rows, {"ranks": step.plain()}, step)

    def _load_own(self, executor: Executor) -> None:
        traces, device = self.job.traces, self.job[InputOptions].device
        if len(traces) > 1:
            own = own_file(list(map(Path, traces)), self._launch.rank, self.job[Selection].unbounded)
            self.job = replace(self.job, traces=(str(own),))
        if device is not None and is_accelerator(device) and ":" not in device:
            device = f"{device}:{self._launch.local_rank}"
            self.job = self.job.having(InputOptions, device=device)
            check_present(device)
            use_device(device)
        self.load(executor)
