"""The Python function `replay()`, and the choice of the kind of replay that a command line requests."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from opgrip.cli.command import counted
from opgrip.cli.options import arguments_of, from_arguments, refuse_options
from opgrip.cli.progress import QuietReporter, Reporter, SilentReporter
from opgrip.errors import NothingSelectedError, UserError, in_words_of_python
from opgrip.replay.analyses import Analysis, UnaskedAnalysis
from opgrip.replay.command.replay_options import make_parser, option_classes, options_of, words_of
from opgrip.replay.command.trace_replay import ReplayOutcome, TraceReplay, keep
from opgrip.replay.command.trace_targets import (
    HASHES,
    OtherMachinesError,
    TraceShare,
    TraceTarget,
    about_parts,
    args_of_one,
    check_kinds,
    common_header,
    deal,
    hash_of,
    prepare_parts,
    remove_if_empty,
    targets_of,
    with_earlier,
    with_traces,
)
from opgrip.replay.operators.devices import check_present, is_accelerator, use_device, with_index
from opgrip.replay.reports import OutputOptions
from opgrip.replay.reports.cells import repeated_rows
from opgrip.replay.reports.fulfilment import unfulfilled
from opgrip.replay.reports.outcome import Results, check_output, is_completed, parts_folder, write_results
from opgrip.replay.results.origins import Origin, this_machine
from opgrip.replay.results.results import Result, summarize
from opgrip.replay.run.request import identifying_options, settle_shard
from opgrip.replay.run.workload import Workload, expected_rows
from opgrip.replay.sequences.step_options import RankLaunch, RankOptions, launch_of
from opgrip.replay.workers.executors import Executor, ExecutorLostError, LocalExecutor, start_executor
from opgrip.replay.workers.journal import journal_path
from opgrip.traces.table.trace import Trace
from opgrip.traces.zoo.manifest import INSTALL

ONE = "one trace"  # value of `Option.only` for options that are valid for a single trace only
_UNFIT = re.compile(r"[^A-Za-z0-9._~-]+")


class Unmatched:
    def __init__(self, traces: int) -> None:
        self._traces = traces
        self._counts: Counter[str] = Counter()
        self._advice = ""

    def add(self, error: NothingSelectedError) -> None:
        self._counts[error.problem] += 1
        self._advice = self._advice or error.advice

    @property
    def are_all(self) -> bool:
        return self._counts.total() == self._traces

    def line(self) -> str:
        reasons = "; ".join(f"{problem} in {count:,}" for problem, count in self._counts.most_common())
        return f"{reasons} of {counted(self._traces, 'trace')}" if reasons else ""

    def error(self) -> UserError:
        return NothingSelectedError(self.line(), f"opgrip corpus --by op lists the traces' operators{self._advice}")


MakeReplay = Callable[[argparse.Namespace, Origin], TraceReplay]


class SeveralReplays:
    def __init__(
        self,
        args: argparse.Namespace,
        targets: Sequence[TraceTarget],
        reporter: Reporter,
        make: MakeReplay,
        runs_here: bool = True,
    ) -> None:
        self._args, self._reporter, self._make = args, reporter, make
        self.targets = targets
        self.output = from_arguments(OutputOptions, args)
        refuse_options(args, option_classes(), (ONE,), "name only one trace")
        request = options_of(copy(args))
        # workers on other machines check their own devices
        for device in request.inputs.devices if runs_here else ():
            check_present(with_index(device))
        self._runs_here = runs_here
        # rows from other machines name their machine
        self._machine_kind = this_machine("cpu").kind if runs_here else ""
        self._options = identifying_options(request)
        self._hashes: dict[str, str | None] = {}
        self._earlier = Results([], {})
        self._shares: dict[str, TraceShare] = {}
        self._rows: dict[str, list[Result]] = {}
        self._headers: dict[str, dict[str, Any]] = {}
        self._problems: dict[str, UserError] = {}
        self._unmatched = Unmatched(len(targets))
        self._analyses: Sequence[Analysis] = ()

    @property
    def folder(self) -> Path | None:
        return None if self.output.output is None else parts_folder(self.output.output)

    def run(self) -> ReplayOutcome:
        if self.output.append and self.output.output is not None and self.output.output.exists():
            self._earlier = Results.load(self.output.output)
        self._set_aside_absent()
        if self.folder is not None:
            about = about_parts(self.targets, self._options, self._args.shard, self._machine_kind)
            self._hashes = about[HASHES]
            prepare_parts(self.folder, self.output, about)
        interrupted, lost = not self._deal(), None
        try:
            interrupted = interrupted or self._run_all()
        except ExecutorLostError as error:
            # the remaining traces would fail in the same way, and their rows would be missing in the output
            lost = error
        names = [target.origin.trace for target in self.targets]
        outcome = ReplayOutcome(
            Results([row for name in names for row in self._rows.get(name, ())], self._header()),
            problems=self._problems,
            unmatched=self._unmatched.line(),
            interrupted=interrupted,
            problem=lost,
            traces=len(self.targets),
            analyses=[item for item in self._analyses if isinstance(item, UnaskedAnalysis)],
        )
        if lost is not None and not self._keeps_rows():
            raise lost
        if not outcome.results.rows and self._problems and not interrupted and lost is None:
            if self.folder is not None:
                remove_if_empty(self.folder)
            raise next(iter(self._problems.values()))
        if self._unmatched.are_all:
            if self.folder is not None:
                remove_if_empty(self.folder)
            raise self._unmatched.error()
        if lost is None and not interrupted:
            outcome.problem = self._write(outcome.results)
        return outcome

    def _set_aside_absent(self) -> None:
        absent = [target.origin.trace for target in self.targets if not target.is_installed]
        self._problems |= dict.fromkeys(absent, UserError("this trace of the zoo is not installed", INSTALL))
        if absent:
            self._reporter.say(f"{len(absent):,} of {counted(len(self.targets), 'trace')} are not installed: {INSTALL}")

    def _deal(self) -> bool:
        part = self._args.shard
        if part is None:
            return True
        doing = f"reading {counted(len(self.targets), 'trace')} for shard {part}"
        try:
            with self._reporter.doing(doing, len(self.targets)) as advance:
                self._shares = deal(self._args, self.targets, part, advance)
        except KeyboardInterrupt:
            return False
        return True

    def _run_all(self) -> bool:
        for index, target in self._finished_first():
            if target.origin.trace in self._problems:
                continue
            if self._args.shard is not None and self._shares[target.origin.trace].shard is None:
                continue
            if self._run_one(index, target):
                return True
        return False

    def _run_one(self, index: int, target: TraceTarget) -> bool:
        name = target.origin.trace
        which = f"{index + 1} of {len(self.targets)}, {name}"
        try:
            args = self._args_of(index, target)
            part = from_arguments(OutputOptions, args).output
            replay = self._make(args, target.origin)
            self._check_new(name, replay)
            if part is not None and part.exists() and not journal_path(part).exists():
                stored = Results.load(part)
                self._check_kinds(part, stored, replay)
                self._rows[name], self._headers[name] = replay.completed_rows(), stored.header
                self._reporter.begin(f"{which}: {counted(len(self._rows[name]), 'row')} from the earlier replay")
                return False
            if part is not None and journal_path(part).exists():
                self._check_kinds(part, (), replay)
            self._reporter.begin(which)
            outcome = replay.run()
        except KeyboardInterrupt:
            # interrupted while reading the trace or earlier rows
            return True
        except (ExecutorLostError, OtherMachinesError):
            raise
        except NothingSelectedError as error:
            self._unmatched.add(error)
            return False
        except UserError as error:
            self._problems[name] = error
            self._reporter.say(f"{which}: not replayed: {error}")
            return False
        self._rows[name], self._analyses = list(outcome.results), outcome.analyses or self._analyses
        # use the header made after the last worker ended: asking for the device creates a context
        self._headers[name] = outcome.results.header
        if outcome.problem is not None:
            self._problems[name] = outcome.problem
        self._reporter.begin(f"{which}: {summarize(self._rows[name])}")
        return outcome.interrupted

    def _check_kinds(self, part: Path, rows: Iterable[Result], replay: TraceReplay) -> None:
        if self._runs_here:
            return
        try:
            header = replay.header
        except UserError as error:
            # skipping only this trace would leave its rows out of the complete results
            raise ExecutorLostError(error.problem, error.hint) from error
        check_kinds(part, rows, header)

    def _args_of(self, index: int, target: TraceTarget) -> argparse.Namespace:
        args = args_of_one(self._args, target)
        args.store, args.append, args.force, args.resume = None, False, False, False
        if args.shard is not None:
            args.shard = self._shares[target.origin.trace].shard
        if self.folder is not None:
            args.output = self._part_of(self.folder, index, target)
            args.resume = args.output.exists() or journal_path(args.output).exists()
        return args

    def _part_of(self, folder: Path, index: int, target: TraceTarget) -> Path:
        return folder / f"{index:03d}-{_UNFIT.sub('-', target.origin.trace)[:60]}.json"

    def _finished_first(self) -> list[tuple[int, TraceTarget]]:
        folder, targets = self.folder, list(enumerate(self.targets))
        if folder is None:
            return targets
        # the machines that measured finished traces determine where the others may run
        return sorted(targets, key=lambda item: not self._part_of(folder, *item).exists())

    def _keeps_rows(self) -> bool:
        if self.folder is None:
            return False
        remove_if_empty(self.folder)
        return self.folder.exists()

    def _check_new(self, name: str, replay: TraceReplay) -> None:
        earlier, output = self._earlier, self.output.output
        own = [row for row in earlier if row.trace == name]
        if not own:
            return
        trace_hash = hash_of(earlier.header.get("traces", {}).get(name))
        if trace_hash is not None and trace_hash != self._hashes[name]:
            raise UserError(f"{output} has rows of another trace named {name}", "write to another file")
        workload = replay.workload
        if repeated_rows(own, expected_rows(workload.cases, workload), workload.timing.caches):
            raise UserError(
                f"{output} already has rows of the trace {name} with the same options",
                "leave the trace out, or write to another file",
            )

    def _write(self, results: Results) -> UserError | None:
        output, header = self.output.output, results.header
        if output is None or self.folder is None:
            return None
        if self._earlier.header:
            header = with_earlier(header, self._earlier.header, self._rows)
        try:
            write_results([*self._earlier, *results], header, output, self.output.may_replace)
        except UserError as error:
            return error
        shutil.rmtree(self.folder, ignore_errors=True)
        return None

    def _header(self) -> dict[str, Any]:
        traces = {}
        for target in self.targets:
            name = target.origin.trace
            about = {key: value for key, value in asdict(target.origin).items() if key != "trace"}
            share = self._shares.get(name)
            about["trace_hash"] = hash_of(self._headers.get(name)) or (share and share.trace_hash)
            if name in self._problems:
                about["problem"] = str(self._problems[name])
            traces[name] = {key: value for key, value in about.items() if value not in (None, "")}
        headers = (self._headers[name] for name in traces if name in self._headers)
        return with_traces(" ".join(map(str, self._args.trace)), common_header(headers), traces)


def replay(
    trace: str | Path | Trace | Sequence[str | Path] | Mapping[str, Any] | None = None, **options: Any
) -> Results:
    """Replay the calls of a trace, or samples, as `opreplay` does.

    ::

        results = replay("traces/faster_rcnn.jsonl", mode=["eager", "jit"], top=20, device="cpu")
        results.frame

    Cases run in a separate process, so that a case that crashes, hangs or takes too much memory does not affect other
    cases.

    trace : a file that `Capture` or `opcapture` wrote, or a `Trace` that was loaded from it, filtered or not; several
        files, a folder of them, `zoo` or `zoo:PATTERN`, which are replayed in turn; `samples`, `sample:NAME`, or a
        folder that `grip` wrote; the contents of a PARAM configuration file as a dictionary; None if `operator` names
        what to replay
    options : long names of options in `opreplay --help`, with `_` for `-`, except `strict` and `list`; a list for
        options that take several values; `inputs` is a dictionary or a list of dictionaries

    Raises TypeError if an option is unknown.

    Raises UserError if the value of an option is invalid, options contradict each other, or a file cannot be read
    or written.
    """
    if isinstance(trace, Trace):
        if trace.path is None or "steps" in trace.selection:
            raise UserError("only whole files can be replayed", "write the steps to one: opgrip trace trim --steps")
        if twice := trace.selection.keys() & options.keys():
            raise UserError(f"the trace is already filtered by {min(twice)}", "pass it only once")
        return replay(trace.path, **trace.selection, **options)
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


def replay_arguments(args: argparse.Namespace, executor: Executor | None = None) -> Results:
    reporter = QuietReporter("opgrip")
    outcome = perform(args, reporter, may_fork=False, executor=executor)
    if outcome is None:
        return Results([], {})
    if outcome.problem is not None:
        raise outcome.problem
    if outcome.interrupted:
        raise KeyboardInterrupt
    output = from_arguments(OutputOptions, args)
    if outcome.was_complete and outcome.traces and output.output is not None:
        return Results.load(output.output)
    if output.store is not None and not outcome.was_complete:
        keep(outcome.results, output, reporter)
    return outcome.results


def perform(
    args: argparse.Namespace,
    reporter: Reporter,
    may_fork: bool = True,
    again: str = "",
    check: Callable[[Workload], object] = lambda workload: None,
    executor: Executor | None = None,
) -> ReplayOutcome | None:
    """Run the replay that a command line requests, and return its results; ranks other than the first return None."""
    settle_shard(args)
    output = from_arguments(OutputOptions, args)
    is_complete = is_completed(output)
    if args.sequence and (launch := launch_of()) is not None:
        return _replay_ranks(args, launch, reporter)
    targets = targets_of(list(map(str, args.trace)))
    if targets is not None and is_complete:
        return ReplayOutcome(Results([], {}), was_complete=True, traces=len(targets))
    with start_executor(args) if executor is None else nullcontext(executor) as executor:
        if targets is not None:
            run = _list_several if output.list else _replay_several
            return run(args, targets, reporter, executor)
        one = TraceReplay(args, reporter, executor, may_fork, again=again)
        if is_complete:
            rows = one.completed_rows()
            return ReplayOutcome(Results(rows, {"trace": one.workload.request.trace}), was_complete=True)
        if output.list:
            return ReplayOutcome(Results([], {}), listed=[("", one.workload.cases)])
        if args.sequence:
            return one.run_sequence()
        check(one.workload)
        return one.run()


def _replay_several(
    args: argparse.Namespace, targets: Sequence[TraceTarget], reporter: Reporter, executor: Executor
) -> ReplayOutcome:
    check_output(from_arguments(OutputOptions, args), args)

    def make(one: argparse.Namespace, origin: Origin) -> TraceReplay:
        return TraceReplay(one, reporter, executor, origin=origin)

    return SeveralReplays(args, targets, reporter, make, executor.runs_here).run()


def _list_several(
    args: argparse.Namespace, targets: Sequence[TraceTarget], reporter: Reporter, executor: Executor
) -> ReplayOutcome:
    unmatched, listed = Unmatched(len(targets)), []
    for target in targets:
        try:
            one = TraceReplay(args_of_one(args, target), reporter, executor, origin=target.origin)
        except NothingSelectedError as error:
            unmatched.add(error)
            continue
        except UserError as error:
            reporter.say(f"{target.origin.trace}: {error}")
            continue
        listed.append((target.origin.trace, one.workload.cases))
    if unmatched.are_all:
        raise unmatched.error()
    return ReplayOutcome(Results([], {}), listed=listed, unmatched=unmatched.line())


def _replay_ranks(args: argparse.Namespace, launch: RankLaunch, reporter: Reporter) -> ReplayOutcome | None:
    from opgrip.replay.sequences.ranks.control import Control

    options = from_arguments(RankOptions, args)
    with Control(launch, options.collective_timeout) as control:
        if not control.is_first:
            args.output = args.store = None
            reporter = SilentReporter("opreplay")
        own = control.together(lambda: TraceReplay(_args_of_rank(args, launch), reporter, LocalExecutor(), False))
        return own.run_ranks(options, control)


def _args_of_rank(args: argparse.Namespace, launch: RankLaunch) -> argparse.Namespace:
    own = copy(args)
    if len(own.trace) > 1:
        from opgrip.replay.sequences.ranks.plan import own_file

        own.trace = [own_file(own.trace, launch.rank, own.unbounded)]
    if own.device is not None and is_accelerator(own.device) and ":" not in own.device:
        own.device = f"{own.device}:{launch.local_rank}"
        check_present(own.device)
        use_device(own.device)
    return own
