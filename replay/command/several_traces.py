"""The replay of several traces: which traces a command line names, and their division into shards."""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

import torch

from opgrip.cli.command import counted
from opgrip.cli.options import refuse_options
from opgrip.cli.progress import Reporter
from opgrip.errors import MissingFileError, NothingSelectedError, UserError
from opgrip.replay.analyses import Analysis, UnaskedAnalysis
from opgrip.replay.cases.selection import Selection
from opgrip.replay.cases.sources import source_of
from opgrip.replay.command.job import ReplayJob
from opgrip.replay.command.replay_kind import Replay, ReplayOutcome
from opgrip.replay.command.run_requests import check_output, options_of, request_of
from opgrip.replay.command.trace_replay import OneTrace
from opgrip.replay.operators.devices import check_present, with_index
from opgrip.replay.reports import OutputOptions
from opgrip.replay.reports.cells import repeated_rows
from opgrip.replay.reports.fidelity import HERE
from opgrip.replay.reports.outcome import Results, is_completed, write_results
from opgrip.replay.reports.results_table import MOST_INPUTS, print_inputs, print_reasons
from opgrip.replay.results.judgement import judged_steps
from opgrip.replay.results.origins import MachineColumns, Origin, this_machine
from opgrip.replay.results.results import Result, summarize
from opgrip.replay.run.request import TORCH, RunRequest, Shard, identifying_options
from opgrip.replay.run.workload import cost_us, expected_rows, load_workload
from opgrip.replay.workers.executors import EngineOptions, Executor, ExecutorLostError
from opgrip.replay.workers.journal import MACHINE_KIND, TRACES, ReplayJournal
from opgrip.traces.io.foreign_files import format_of
from opgrip.traces.io.shipped_traces import trace_file
from opgrip.traces.zoo import ZooTrace, patterns_in, read_manifest, select, zoo_file
from opgrip.traces.zoo.manifest import FIELD, INSTALL, distinct_names, name_of_file, name_of_trace

NAMED = 4  # maximum number of traces that a message names
ONE = "one trace"  # value of `Option.only` for options that are valid for a single trace only
ZOO = "zoo"
SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")  # file name suffixes of traces in a folder


@dataclass(frozen=True, slots=True)
class TraceTarget:
    origin: Origin
    file: str | None = None  # None for a trace of the zoo
    zoo: ZooTrace | None = None  # its file may not be installed

    def path(self) -> str:
        return str(zoo_file(self.zoo)) if self.zoo is not None else str(self.file)

    @property
    def is_installed(self) -> bool:
        try:
            self.path()
        except MissingFileError:
            return False
        return True


def targets_of(names: Sequence[str]) -> list[TraceTarget] | None:
    """Return the traces that a command line names, each once; None for a single trace or for samples."""
    if len(names) == 1 and not (_is_zoo(names[0]) or is_folder_of_traces(names[0])):
        return None
    manifest = {trace.name: trace for trace in read_manifest()}
    targets: dict[str, TraceTarget] = {}
    for name in names:
        for target in _targets(name, manifest):
            targets.setdefault(target.origin.trace if target.zoo else str(trace_file(target.path()).resolve()), target)
    return list(_with_distinct_names(list(targets.values()))) if targets else None


def is_folder_of_traces(name: str) -> bool:
    folder = Path(name)
    return folder.is_dir() and format_of(folder) is None and bool(_files_in(folder)) and not any(folder.glob("*.py"))


def _is_zoo(name: str) -> bool:
    # a folder named `zoo` may be anything, such as a package
    is_own = Path(name).is_file() or is_folder_of_traces(name)
    return name.startswith(f"{ZOO}:") or (name == ZOO and not is_own)


def _targets(name: str, manifest: dict[str, ZooTrace]) -> Iterator[TraceTarget]:
    if _is_zoo(name):
        for trace in select(patterns_in(name.partition(":")[2]), list(manifest.values())):
            yield TraceTarget(Origin(*name_of_trace(trace)), zoo=trace)
    elif is_folder_of_traces(name):
        for file in _files_in(Path(name)):
            yield TraceTarget(Origin(*name_of_file(file, manifest)), str(file))
    elif name.startswith("sample:") or (Path(name).is_dir() and format_of(Path(name)) is None):
        raise UserError(
            f"{name} is a sample, and samples cannot be listed one by one or with traces",
            "name several samples as sample:NAME,NAME, or the folder that contains them",
        )
    else:
        yield TraceTarget(Origin(*name_of_file(name, manifest)), name)


def _files_in(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.name.endswith(SUFFIXES) and file.is_file())


def _with_distinct_names(targets: Sequence[TraceTarget]) -> Iterator[TraceTarget]:
    names = distinct_names([target.origin.trace for target in targets])
    for target, name in zip(targets, names, strict=True):
        yield replace(target, origin=replace(target.origin, trace=name))


@dataclass(frozen=True, slots=True)
class TraceShare:
    shard: Shard | None  # None if the shard has no cases of the trace
    trace_hash: str | None  # None if the trace cannot be read


def deal(
    job: ReplayJob, targets: Sequence[TraceTarget], part: Shard, advance: Callable[[], None]
) -> dict[str, TraceShare]:
    whole = job.having(EngineOptions, shard=None)
    costs: list[tuple[str, int, str | None]] = []
    for target in targets:
        costs.append((target.origin.trace, *_cost(whole, target)))
        advance()
    total_us, offset_us = sum(cost for _, cost, _ in costs), 0
    shares = {}
    for name, cost, trace_hash in costs:
        own = replace(part, offset_us=offset_us, total_us=total_us)
        shares[name] = TraceShare(own if own.has_part_of(cost) else None, trace_hash)
        offset_us += cost
    return shares


def _cost(job: ReplayJob, target: TraceTarget) -> tuple[int, str | None]:
    try:
        workload = load_workload(request_of(replace(job, traces=(target.path(),))))
    except UserError:
        # exactly one shard replays a trace that cannot be read, and reports the error
        return 1, None
    trace_hash = source_of(workload.request.trace).fingerprint(workload.request.trace)
    return sum(cost_us(case, workload) for case in workload.cases), trace_hash


def _trace_hash(target: TraceTarget) -> str | None:
    try:
        path = target.path()
        return source_of(path).fingerprint(path)
    except (UserError, OSError):
        # its replay reports the error later
        return None


OF_TRACE = ("trace", "trace_hash", FIELD, HERE)  # header fields that differ between traces


def common_header(headers: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    return {name: value for name, value in next(iter(headers), {}).items() if name not in OF_TRACE}


def with_traces(words: str, common: Mapping[str, Any], traces: Mapping[str, Any]) -> dict[str, Any]:
    hashes = json.dumps([hash_of(about) for about in traces.values()])
    whole = hashlib.blake2b(hashes.encode(), digest_size=16).hexdigest()
    return {"trace": words, **common, "trace_hash": whole, "traces": dict(traces)}


def with_earlier(header: Mapping[str, Any], earlier: Mapping[str, Any], replayed: Collection[str]) -> dict[str, Any]:
    facts = earlier.get("traces", {})
    new = {name: about for name, about in header["traces"].items() if name in replayed or name not in facts}
    words = dict.fromkeys(filter(None, (earlier.get("trace"), header["trace"])))
    return with_traces(" ".join(words), common_header([header]), {**facts, **new})


def hash_of(about: Any) -> str | None:
    return about.get("trace_hash") if isinstance(about, Mapping) else None


class OtherMachinesError(UserError):
    pass


class Unmatched:
    def __init__(self, traces: int) -> None:
        self._traces = traces
        self._counts: Counter[str] = Counter()
        self._advice = ""

    def add(self, error: NothingSelectedError) -> None:
        self._counts[error.problem] += 1
        self._advice = self._advice or error.advice

    def line(self) -> str:
        reasons = "; ".join(f"{problem} in {count:,}" for problem, count in self._counts.most_common())
        return f"{reasons} of {counted(self._traces, 'trace')}" if reasons else ""

    def raise_if_all(self) -> None:
        if self._counts.total() == self._traces:
            raise NothingSelectedError(self.line(), f"opgrip corpus --by op lists the traces' operators{self._advice}")


class SeveralTraces(Replay):
    """The replay of the cases of several traces, one trace after the other."""

    def __init__(
        self,
        job: ReplayJob,
        reporter: Reporter,
        targets: Sequence[TraceTarget],
        again: str = "",
        executor: Executor | None = None,
    ) -> None:
        super().__init__(job, reporter, again, executor)
        self.targets = targets
        self._shard = job[EngineOptions].shard
        self._hashes: dict[str, str | None] = {}
        self._earlier = Results([], {})
        self._shares: dict[str, TraceShare] = {}
        self._rows: dict[str, list[Result]] = {}
        self._headers: dict[str, dict[str, Any]] = {}
        self._problems: dict[str, UserError] = {}
        self._unmatched = Unmatched(len(targets))
        self._analyses: Sequence[Analysis] = ()

    def run(self) -> ReplayOutcome:
        if is_completed(self.output):
            return ReplayOutcome(Results([], {}), was_complete=True)
        with self.executor() as executor:
            check_output(self.job)
            if self.output.list:
                return self._list(executor)
            refuse_options(self.job.options, (ONE,), "name only one trace")
            request = options_of(self.job)
            # workers on other machines check their own devices
            for device in request.inputs.devices if executor.runs_here else ():
                check_present(with_index(device))
            if self.output.append and self.output.output is not None and self.output.output.exists():
                self._earlier = Results.load(self.output.output)
            self._set_aside_absent()
            with self._open_journal(request, executor) as journal:
                return self._run_with(journal, executor)

    def _open_journal(self, request: RunRequest, executor: Executor) -> AbstractContextManager[ReplayJournal | None]:
        output = self.output
        if output.output is None:
            return nullcontext()
        self._hashes = {target.origin.trace: _trace_hash(target) for target in self.targets}
        same = {
            TRACES: [*self._hashes],
            "options": identifying_options(request),
            TORCH: str(torch.__version__),
            # rows from other machines name their machine
            MACHINE_KIND: this_machine("cpu").kind if executor.runs_here else "",
            "shard": None if self._shard is None else str(self._shard),
        }
        return ReplayJournal(output.output, same, output.resume, output.force or output.append, self._hashes)

    def _run_with(self, journal: ReplayJournal | None, executor: Executor) -> ReplayOutcome:
        interrupted, lost = not self._deal(), None
        try:
            interrupted = interrupted or self._run_all(journal, executor)
        except ExecutorLostError as error:
            if journal is None or journal.is_empty:
                raise
            # the remaining traces would fail in the same way, and their rows would be missing in the output
            lost = error
        names = [target.origin.trace for target in self.targets]
        outcome = ReplayOutcome(
            Results([row for name in names for row in self._rows.get(name, ())], self._header()),
            problems=self._problems,
            unmatched=self._unmatched.line(),
            interrupted=interrupted,
            problem=lost,
            analyses=[item for item in self._analyses if isinstance(item, UnaskedAnalysis)],
        )
        if not outcome.results.rows and self._problems and not interrupted and lost is None:
            raise next(iter(self._problems.values()))
        self._unmatched.raise_if_all()
        if journal is not None and lost is None and not interrupted:
            outcome.problem = self._write(outcome.results, journal)
        return outcome

    def _list(self, executor: Executor) -> ReplayOutcome:
        listed = []
        for target in self.targets:
            try:
                one = self._one(target, executor)
                one.load(executor)
            except NothingSelectedError as error:
                self._unmatched.add(error)
                continue
            except UserError as error:
                self.reporter.say(f"{target.origin.trace}: {error}")
                continue
            listed.append((target.origin.trace, one.workload.cases))
        self._unmatched.raise_if_all()
        return ReplayOutcome(Results([], {}), listed=listed, unmatched=self._unmatched.line())

    def _one(self, target: TraceTarget, executor: Executor, journal: ReplayJournal | None = None) -> OneTrace:
        job = replace(self.job, traces=(target.path(),))
        job = job.having(OutputOptions, output=None, store=None, append=False, force=False, resume=False)
        if self._shares:
            job = job.having(EngineOptions, shard=self._shares[target.origin.trace].shard)
        return OneTrace(job, self.reporter, executor=executor, origin=target.origin, journal=journal)

    def _set_aside_absent(self) -> None:
        absent = [target.origin.trace for target in self.targets if not target.is_installed]
        self._problems |= dict.fromkeys(absent, UserError("this trace of the zoo is not installed", INSTALL))
        if absent:
            self.reporter.say(f"{len(absent):,} of {counted(len(self.targets), 'trace')} are not installed: {INSTALL}")

    def _deal(self) -> bool:
        part = self._shard
        if part is None:
            return True
        doing = f"reading {counted(len(self.targets), 'trace')} for shard {part}"
        try:
            with self.reporter.doing(doing, len(self.targets)) as advance:
                self._shares = deal(self.job, self.targets, part, advance)
        except KeyboardInterrupt:
            return False
        return True

    def _run_all(self, journal: ReplayJournal | None, executor: Executor) -> bool:
        finished = {} if journal is None else journal.finished
        # the machines that measured finished traces determine where the others may run
        for index, target in sorted(enumerate(self.targets), key=lambda item: item[1].origin.trace not in finished):
            name = target.origin.trace
            if name in self._problems or (self._shares and self._shares[name].shard is None):
                continue
            if self._run_one(index, target, journal, executor):
                return True
        return False

    def _run_one(self, index: int, target: TraceTarget, journal: ReplayJournal | None, executor: Executor) -> bool:
        name = target.origin.trace
        which = f"{index + 1} of {len(self.targets)}, {name}"
        finished = None if journal is None else journal.finished.get(name)
        try:
            one = self._one(target, executor, journal)
            if finished is None or not executor.runs_here or self._earlier.rows:
                one.load(executor)
                self._check_new(name, one)
                if journal is not None and not executor.runs_here:
                    _check_kinds(name, journal, one)
            if finished is not None:
                self._rows[name], self._headers[name] = finished
                self.reporter.begin(f"{which}: {counted(len(self._rows[name]), 'row')} from the earlier replay")
                return False
            self.reporter.begin(which)
            outcome = one.run_loaded()
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
            self.reporter.say(f"{which}: not replayed: {error}")
            return False
        self._rows[name], self._analyses = list(outcome.results), outcome.analyses or self._analyses
        # use the header made after the last worker ended: asking for the device creates a context
        self._headers[name] = outcome.results.header
        if outcome.problem is not None:
            self._problems[name] = outcome.problem
        elif journal is not None and not outcome.interrupted:
            journal.finish(name, self._rows[name], self._headers[name])
        self.reporter.begin(f"{which}: {summarize(self._rows[name])}")
        return outcome.interrupted

    def _check_new(self, name: str, one: OneTrace) -> None:
        earlier, output = self._earlier, self.output.output
        own = [row for row in earlier if row.trace == name]
        if not own:
            return
        trace_hash = hash_of(earlier.header.get("traces", {}).get(name))
        if trace_hash is not None and trace_hash != self._hashes[name]:
            raise UserError(f"{output} has rows of another trace named {name}", "write to another file")
        workload = one.workload
        if repeated_rows(own, expected_rows(workload.cases, workload), workload.timing.caches):
            raise UserError(
                f"{output} already has rows of the trace {name} with the same options",
                "leave the trace out, or write to another file",
            )

    def _write(self, results: Results, journal: ReplayJournal) -> UserError | None:
        output, header = self.output.output, results.header
        assert output is not None, "it has a journal"
        if self._earlier.header:
            header = with_earlier(header, self._earlier.header, self._rows)
        try:
            write_results([*self._earlier, *results], header, output, self.output.may_replace)
        except UserError as error:
            return error
        journal.path.unlink(missing_ok=True)
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
        return with_traces(" ".join(self.job.traces), common_header(headers), traces)

    def score_printers(self, baseline: Path | None) -> list[Callable[[Results, IO[str]], None]]:
        return [scorer.against(baseline) for scorer in self.scorers]

    def print_results(self, outcome: ReplayOutcome) -> None:
        rows = list(outcome.results)
        if rows and not judged_steps(rows):
            shows_inputs = not self.job[Selection].selects_all or len(rows) <= MOST_INPUTS
            if shows_inputs:
                print_inputs(rows, sys.stdout)
            self.print_scores(outcome.results)
            if not shows_inputs:
                print_reasons(rows, sys.stdout)
        for analysis in outcome.analyses:
            analysis.print(rows, sys.stdout)
        if outcome.problem is not None:
            self.reporter.say(f"the rows are kept; continue with: {self.again}")

    def where_interrupted(self, outcome: ReplayOutcome) -> str:
        return f"interrupted in trace {max(len({row.trace for row in outcome.results}), 1)} of {len(self.targets)}"

    def closing_lines(self, outcome: ReplayOutcome) -> Iterator[str]:
        yield from super().closing_lines(outcome)
        if outcome.problems:
            names, more = list(outcome.problems)[:NAMED], len(outcome.problems) - NAMED
            listed = ", ".join([*names, *([f"{more} more"] if more > 0 else [])])
            yield f"{len(outcome.problems)} of {counted(len(self.targets), 'trace')} not replayed: {listed}"


def _check_kinds(trace: str, journal: ReplayJournal, one: OneTrace) -> None:
    rows = [row for case_rows in journal.measured(trace).values() for row in case_rows]
    try:
        present = set(one.header.get("machines", {}).values()) if rows else set()
    except UserError as error:
        # skipping only this trace would leave its rows out of the complete results
        raise ExecutorLostError(error.problem, error.hint) from error
    others = sorted({kind for row in rows if (kind := MachineColumns.of(row).machine_kind)} - present)
    if present and others:
        words = f"{journal.path} contains rows measured on another kind of machine ({'; '.join(others)})"
        problem = f"{words} than the present one ({'; '.join(sorted(present))})"
        raise OtherMachinesError(problem, "continue with --machine-kind on such machines, or start again with --force")
