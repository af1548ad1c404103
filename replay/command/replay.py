"""Replays a trace or samples: selects cases, runs them in a process of their own, and adds what analyses find."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import torch

from opgrip.cli.command import printable
from opgrip.cli.options import arguments_of, from_arguments
from opgrip.cli.plural import counted
from opgrip.cli.progress import QuietReporter, Reporter
from opgrip.errors import UserError, in_words_of_python
from opgrip.platform.machine import available_memory
from opgrip.replay.analyses import Analysis, AnalysisSession, in_order
from opgrip.replay.cases.sources import source_of
from opgrip.replay.command.repeating import Launched, repeat, replay_launched
from opgrip.replay.command.several.run import SeveralReplays
from opgrip.replay.command.several.targets import Target, targets_of
from opgrip.replay.comparison.store.store import Store, usual_folder
from opgrip.replay.operators.admission import absent_extensions
from opgrip.replay.operators.devices import is_accelerator
from opgrip.replay.outcome import ReplayOutcome, Results, read_run, write_results
from opgrip.replay.outputs import check_output, is_completed
from opgrip.replay.replay_options import Output, job_of, make_parser, run_settings, words_of
from opgrip.replay.reports.cells import read_results
from opgrip.replay.reports.completed import OPTIONS, read_completed
from opgrip.replay.reports.fulfilment import unfulfilled
from opgrip.replay.results.origins import Origin, this_machine
from opgrip.replay.results.results import RAN, SETTINGS, Result
from opgrip.replay.run.measure import CachedRows
from opgrip.replay.run.preparation import expected_rows
from opgrip.replay.sequences.ranks.control import Control
from opgrip.replay.sequences.ranks.replay_ranks import StepOutcome, replay_ranks
from opgrip.replay.sequences.step_options import RankLaunch, RankOptions, launch_of
from opgrip.replay.sequences.step_process import replay_apart
from opgrip.replay.sequences.step_results import SequenceResult
from opgrip.replay.sequences.step_rows import rows_of, totals_of
from opgrip.replay.workers.engines.engine import Engine
from opgrip.replay.workers.engines.local_processes import ProcessEngine, start_engine
from opgrip.replay.workers.job import Job, Loaded
from opgrip.replay.workers.journal import Journal, journal_path, options_hash
from opgrip.replay.workers.shards import settle_shard
from opgrip.traces.table.call_table import COUNT
from opgrip.traces.zoo.manifest import FIELD


def replay(trace: str | Path | Sequence[str | Path] | Mapping[str, Any] | None = None, **options: Any) -> Results:
    """Replay the calls of a trace, or samples, as `opreplay` does.

    ::

        results = replay("traces/faster_rcnn.jsonl", mode=["eager", "jit"], top=20, device="cpu")
        results.frame

    Cases run in a process of their own: one that crashes, hangs or takes too much memory costs its row alone. That
    process starts as the program did, so a script calls this under `if __name__ == "__main__":`.

    Parameters
    ----------
    trace : a file that `Capture` or `opcapture` wrote; several of them, a folder of them, `zoo` or `zoo:PATTERN`,
        which are replayed in turn; `samples`, `sample:NAME`, or a folder that `grip` wrote; what a configuration file
        of PARAM holds, as a dictionary; None where `operator` names what to replay
    options : those of `opreplay --help` by their long names, with `_` for `-`. Where an option takes several, a list;
        `inputs` as a dictionary, or a list of these

    Raises
    ------
    TypeError : for an option that there is not
    UserError : for values that an option does not take, options that do not go together, and files that cannot be
        read or written
    """
    if isinstance(trace, Mapping):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "configuration.json")
            path.write_text(json.dumps(trace), encoding="utf-8")
            results = replay(path, **options)
            return replace(results, header={**results.header, "trace": path.name})
    with in_words_of_python():
        args = arguments_of(make_parser(), words_of(trace), options, excluded=("strict", "list"))
        results = replay_arguments(args)
    for line in unfulfilled(args, results.rows):
        warnings.warn(line, stacklevel=2)
    return results


def replay_arguments(args: argparse.Namespace) -> Results:
    """Replay what a parsed command line of `opreplay` asks for; raises as `replay` does."""
    settle_shard(args)
    is_done = is_completed(from_arguments(Output, args))
    if args.sequence and (launch := launch_of()) is not None:
        launched = replay_with_ranks(args, launch, QuietReporter("opgrip"))
        return Results([], {}) if launched is None else launched.whole.kept(launched.results)
    targets = targets_of(list(map(str, args.trace)))
    if targets is not None:
        return _replay_several(args, targets, is_done)
    with start_engine(args) as engine:
        whole = Replay(args, QuietReporter("opgrip"), may_fork=False, engine=engine)
        if whole.is_sequence:
            return whole.kept(whole.run_sequence()[0])
        if is_done:
            return Results(whole.completed_rows(), {"trace": whole.job.trace})
        replayed = whole.run()
    if replayed.problem is not None:
        raise replayed.problem
    if replayed.interrupted:
        raise KeyboardInterrupt
    return whole.kept(replayed.results)


def replay_with_ranks(args: argparse.Namespace, launch: RankLaunch, reporter: Reporter) -> Launched[Replay] | None:
    """Replay a rank's part of a step, with the other ranks; None in all but the first; raises as `replay_launched`."""
    return replay_launched(args, launch, reporter, lambda own, tells: Replay(own, tells, may_fork=False))


def several_replays(
    args: argparse.Namespace, targets: Sequence[Target], reporter: Reporter, engine: Engine
) -> SeveralReplays:
    """The replays of several traces in turn; raises as `SeveralReplays` does."""
    check_output(from_arguments(Output, args), args)

    def make(one: argparse.Namespace, tells: Reporter, origin: Origin) -> Replay:
        return Replay(one, tells, origin=origin, engine=engine)

    return SeveralReplays(args, targets, reporter, make, engine.here)


def _replay_several(args: argparse.Namespace, targets: Sequence[Target], is_done: bool) -> Results:
    output = from_arguments(Output, args)
    if is_done and output.output is not None:
        return read_run(output.output)
    with start_engine(args) as engine:
        outcome = several_replays(args, targets, QuietReporter("opgrip"), engine).run()
    if outcome.problem is not None:
        raise outcome.problem
    if outcome.interrupted:
        raise KeyboardInterrupt
    if output.store is not None:
        keep(outcome.results, output, QuietReporter("opgrip"))
    return outcome.results


def keep(results: Results, output: Output, reporter: Reporter) -> Path | None:
    """Put results in the store, and say where; None where none are kept.

    Raises
    ------
    UserError : where a store that was named cannot be written
    """
    folder = output.store or usual_folder()
    if folder is None or not results.rows:
        return None
    try:
        return Store(folder).keep(results.rows, results.header)
    except UserError as error:
        if output.store is not None:
            raise
        reporter.say(f"the results are not kept: {error}")
        return None


def _base_of(output: Output, origin: Origin | None) -> Results:
    """What the results are held against."""
    assert output.until_decided is not None, "asked for"
    base = read_run(Store(output.store).find(output.until_decided))
    return base if origin is None else Results([row for row in base if row.trace == origin.trace], base.header)


class Replay:
    """A replay that a command line asks for, its trace loaded.

    Parameters
    ----------
    may_fork : whether this process has run nothing of torch yet, and forks of it can
    origin : the trace, where it is one of several that are replayed together
    engine : what runs the cases; None for processes of this machine

    Attributes
    ----------
    stored_cases : how many cases have their rows in the journal, after `run`

    Raises
    ------
    UserError : for options that do not go together, and files that cannot be read or written
    """

    def __init__(
        self,
        args: argparse.Namespace,
        reporter: Reporter,
        may_fork: bool = True,
        origin: Origin | None = None,
        engine: Engine | None = None,
    ) -> None:
        self._args, self._reporter, self._may_fork, self._origin = args, reporter, may_fork, origin
        self._began = datetime.now(timezone.utc)
        self.output = from_arguments(Output, args)
        self._base = None if self.output.until_decided is None else _base_of(self.output, origin)
        self.is_sequence: bool = args.sequence
        self.stored_cases = 0
        check_output(self.output, args)
        job = job_of(args)
        with reporter.reading(job.trace):
            loaded = job.load()
        for note in (*loaded.notes, *job.plan.points.notes, *absent_extensions(job.plan.inputs.extension)):
            reporter.say(note)
        device = loaded.settings.device
        engine = engine or ProcessEngine()
        engine.runner(job, loaded, may_fork).check()
        job.plan.timing.check_device(device)
        limits = job.plan.limits
        if engine.here and not is_accelerator(device):
            limits = replace(limits, memory_limit=limits.memory_limit or available_memory(device))
        self.job: Job = replace(job, plan=replace(job.plan, limits=limits))
        self.loaded: Loaded = replace(loaded, settings=replace(loaded.settings, limits=limits))
        self._runner = engine.runner(self.job, self.loaded, may_fork)
        self._runs_here = engine.here

    @property
    def header(self) -> dict[str, Any]:
        """Where results come from, as files say it."""
        trace, about_engine = self.job.trace, self._runner.about()
        seed = self.job.plan.inputs.seed
        header = {"trace": trace, "torch": torch.__version__, "device": about_engine["device"], "seed": seed}
        if self.job.shard is not None:
            header["shard"] = str(self.job.shard)
        about = {
            "time": self._began.isoformat(timespec="seconds"),
            "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
            "trace_hash": source_of(trace).fingerprint(trace),
            OPTIONS: options_hash(self.job.selection, self.job.plan),
        }
        distilled = self.loaded.trace.header.get(FIELD)
        stands_for = {FIELD: distilled} if isinstance(distilled, dict) else {}
        settings = run_settings(self._args)
        return header | about | about_engine | stands_for | ({SETTINGS: settings} if settings else {})

    def kept(self, results: Results) -> Results:
        """Results, in the store too where one was named."""
        if self.output.store is not None:
            self.keep(results)
        return results

    def keep(self, results: Results) -> Path | None:
        """Put results in the store, and say where; see `keep`."""
        return keep(results, self.output, self._reporter)

    def completed_rows(self) -> list[Result]:
        """The rows of the output, which an earlier replay completed; `UserError` where they are of another one."""
        path, loaded = self.output.output, self.loaded
        assert path is not None, "an earlier replay wrote it"
        expected = expected_rows(loaded.cases, loaded.settings)
        return read_completed(path, expected, loaded.devices, loaded.settings.timing.caches, self.header)

    def run(self) -> ReplayOutcome:
        """Run the cases, let the analyses add to them, and write the output."""
        output = self.output
        requested = self._analyses()
        earlier = []
        if output.append and output.output is not None and output.output.exists():
            earlier = read_results(output.output)
        rows, interrupted = self._run_cases()
        # asked for now that no worker needs the device: to ask makes a context
        header = self.header
        if interrupted:
            return ReplayOutcome(
                Results(rows, header), interrupted=True, analyses=[item for item in requested if item.prints_partial]
            )
        try:
            for analysis in requested:
                rows = analysis.add_to(rows)
                header |= analysis.header
        except UserError as error:
            return ReplayOutcome(Results(rows, header), problem=error)
        results, problem = Results(rows, header), None
        if output.output is not None:
            try:
                write_results([*earlier, *rows], header, output.output, output.may_replace)
            except UserError as error:
                problem = error
            else:
                if all(analysis.saw_all for analysis in requested):
                    for analysis in requested:
                        analysis.finish()
                    journal_path(output.output).unlink(missing_ok=True)
        return ReplayOutcome(results, problem=problem, analyses=requested)

    def run_sequence(self) -> tuple[Results, SequenceResult]:
        """Run all calls in their order, and write the output: the rows of the cases, and what the whole took."""
        loaded = self.loaded
        doing = f"replaying {counted(len(loaded.trace.own_calls), 'call')} in their order on {loaded.settings.device}"
        with self._reporter.following(doing) as tell:
            result = replay_apart(self.job, loaded, tell, self._may_fork)
        results = Results(rows_of(result, loaded.cases, loaded.settings), self.header | {"sequence": totals_of(result)})
        if self.output.output is not None:
            write_results(results.rows, results.header, self.output.output, self.output.may_replace)
        return results, result

    def run_ranks(self, options: RankOptions, control: Control) -> tuple[StepOutcome | None, Results]:
        """Run this rank's calls with the other ranks; in the first, give what all took, and write the output."""
        calls = counted(int(self.loaded.trace.own_distinct_calls[COUNT].sum()), "call")
        doing = f"replaying {calls} of {counted(control.launch.world_size, 'rank')} on {self.loaded.settings.device}"
        with self._reporter.following(doing) as tell:
            outcome = replay_ranks(self.loaded, options, control, tell)
        if outcome is None:
            return None, Results([], {})
        results = Results(outcome.rows, self.header | {"ranks": outcome.plain()})
        if self.output.output is not None:
            write_results(results.rows, results.header, self.output.output, self.output.may_replace)
        return outcome, results

    def _analyses(self) -> list[Analysis]:
        """Those that the options ask for, made before any case runs."""
        session = AnalysisSession(
            self.job,
            self.loaded,
            self.output.output,
            self.output.may_replace,
            self.output.resume,
            self._reporter,
            self._may_fork,
        )
        requested: list[Analysis] = []
        for analysis in in_order():
            options: Any = from_arguments(analysis.options, self._args)
            if analysis.is_requested(options):
                requested.append(analysis(options, session))
        return requested

    def _run_cases(self) -> tuple[list[Result], bool]:
        """The rows of all cases in order, and whether the user ended it before the last; the journal stays."""
        loaded, output = self.loaded, self.output
        rows: dict[int, list[Result]] = {}
        with ExitStack() as stack:
            journal = None
            if output.output is not None:
                begins_anew = output.force or output.append
                journal = stack.enter_context(
                    Journal(output.output, self.job, self._runner.machine_kind(), output.resume, begins_anew)
                )
                rows = journal.rows
                self.stored_cases = len(rows)
            remaining = len(loaded.cases) - len(rows)
            compiled = self._runner.compile(rows, self._reporter)
            doing = f"replaying {counted(remaining, 'case')} on {', '.join(loaded.devices)}"
            try:
                not_ok = 0
                with self._reporter.doing(doing, remaining) as advance:
                    for case_rows in self._run_others(rows, compiled):
                        if journal is not None:
                            journal.add(case_rows)
                            self.stored_cases = len(journal.rows)
                        rows[case_rows[0].case] = case_rows
                        not_ok += any(row.status not in RAN for row in case_rows)
                        advance(_how_things_stand(not_ok, case_rows[0]))
            except KeyboardInterrupt:
                return self._in_order(rows), True
        try:
            plan = self.job.plan
            run_again = partial(self._run_again, compiled)
            rows = repeat(rows, run_again, plan.effort.repeats, self._base, plan.modes.reference)
        except KeyboardInterrupt:
            return self._in_order(rows), True
        if self._base is not None:
            self._say_what_is_decided(self._base, self._in_order(rows))
        return self._in_order(rows), False

    def _say_what_is_decided(self, base: Results, rows: Sequence[Result]) -> None:
        """Say what came of repeating cases until it is sure how they differ from another run."""
        from opgrip.replay.comparison import compare
        from opgrip.replay.comparison.reports.comparison_rows import advice, summary

        comparison = compare(base, Results(rows, {}))
        self._reporter.say(f"against {self.output.until_decided}: {summary(comparison)}")
        for line in advice(comparison):
            self._reporter.say(line)

    def _run_again(self, compiled: CachedRows, numbers: Collection[int], which: str) -> dict[int, list[Result]]:
        """The rows of some cases, by processes of their own."""
        loaded = self.loaded
        others = {case.number for case in loaded.cases} - {*numbers}
        rows: dict[int, list[Result]] = {}
        not_ok = 0
        with self._reporter.doing(f"{which}: {counted(len(numbers), 'case')}", len(numbers)) as advance:
            for case_rows in self._run_others(others, compiled):
                rows[case_rows[0].case] = case_rows
                not_ok += any(row.status not in RAN for row in case_rows)
                advance(_how_things_stand(not_ok, case_rows[0]))
        return rows

    def _run_others(self, done: Collection[int], compiled: CachedRows) -> Iterator[list[Result]]:
        """The rows of the cases that are not done, as they come."""
        origin, shard = self._origin, self.job.shard
        # workers elsewhere say themselves which machine measured a row
        machine = this_machine(self.loaded.settings.device) if self._runs_here and shard is not None else None
        for rows in self._runner.run(done, compiled):
            if machine is not None:
                rows = [machine.marked(row) for row in rows]
            yield rows if origin is None else [origin.marked(row) for row in rows]

    def _in_order(self, rows: dict[int, list[Result]]) -> list[Result]:
        return [row for case in self.loaded.cases for row in rows.get(case.number, [])]


def _how_things_stand(not_ok: int, row: Result) -> str:
    return f"{f'{not_ok} not ok, ' if not_ok else ''}{printable(row.op)}"
