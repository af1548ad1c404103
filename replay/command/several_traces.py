"""Replay of several traces one after the other, with the same options and one file of results."""

from __future__ import annotations

import argparse
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import asdict
from pathlib import Path
from typing import Any

from opgrip.cli.command import counted
from opgrip.cli.options import from_arguments, refuse_options
from opgrip.cli.progress import Reporter
from opgrip.errors import NothingSelectedError, UserError
from opgrip.replay.analyses import Analysis, UnaskedAnalysis
from opgrip.replay.command.trace_replay import ReplayOutcome, TraceReplay
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
    with_earlier,
    with_traces,
)
from opgrip.replay.operators.devices import check_present, with_index
from opgrip.replay.outcome import Results, parts_folder, read_run, write_results
from opgrip.replay.replay_options import OutputOptions, option_classes, options_of
from opgrip.replay.reports.cells import repeated_rows
from opgrip.replay.results.origins import Origin, this_machine
from opgrip.replay.results.results import Result, summarize
from opgrip.replay.run.request import identifying_options
from opgrip.replay.run.workload import expected_rows
from opgrip.replay.workers.executors import ExecutorLostError
from opgrip.replay.workers.journal import journal_path
from opgrip.traces.zoo.manifest import INSTALL

ONE = "one trace"  # value of `Option.only` for options that are valid for a single trace only
_UNFIT = re.compile(r"[^A-Za-z0-9._~-]+")


class Unmatched:
    """Counts the traces in which the user's options select no case."""

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
    """Replays the traces that a command line names, one after the other.

    If there is an output file, the rows of each trace are kept in a folder next to it, so that `--resume` can continue.

    make : function that creates the replay of one trace
    runs_here : True if the cases run on this machine
    """

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
        refuse_options(args, option_classes(), (ONE,), "name one with it")
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
        """Folder that keeps the rows of each trace until the output file is written; None without an output file."""
        return None if self.output.output is None else parts_folder(self.output.output)

    def run(self) -> ReplayOutcome:
        """Replay all traces, write the output file, and return the results and how the replay ended.

        Raises `UserError` if no trace can be replayed, or if rows of an earlier run cannot be combined with new ones.
        """
        if self.output.append and self.output.output is not None and self.output.output.exists():
            self._earlier = read_run(self.output.output)
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
        """Replay one trace, and return True if the user interrupts it."""
        name = target.origin.trace
        which = f"{index + 1} of {len(self.targets)}, {name}"
        try:
            args = self._args_of(index, target)
            part = from_arguments(OutputOptions, args).output
            replay = self._make(args, target.origin)
            self._check_new(name, replay)
            if part is not None and part.exists() and not journal_path(part).exists():
                stored = read_run(part)
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
