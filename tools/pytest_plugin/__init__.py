"""The pytest plug-in: runs replays of traces and samples as tests, and compares their times with a baseline."""

from __future__ import annotations

import hashlib
import io
import shlex
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from opgrip.cli.command import counted
from opgrip.errors import UserError
from opgrip.tools.pytest_plugin.measured import (
    BENCHMARKS,
    CASE,
    JUDGED,
    KEY,
    RESULTS,
    Benchmarks,
    Judged,
    SharedFolder,
    Turns,
    add_options,
    opgrip_benchmark,
    opgrip_replay,
    print_summary,
    read_options,
    rows_of_test,
    save_rows,
)

if TYPE_CHECKING:
    from opgrip.replay.cases.cases import Case
    from opgrip.replay.command.job import ReplayJob
    from opgrip.replay.reports.outcome import Results
    from opgrip.replay.results.results import Result

__all__ = ["opgrip_benchmark", "opgrip_replay"]

FIXTURES = ("opgrip_benchmark", "opgrip_replay")  # fixtures that measure
CARRIED = "opgrip_results"  # report attribute that pytest-xdist sends to the controller


def pytest_addoption(parser: pytest.Parser) -> None:
    add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    folder = getattr(config, "workerinput", {}).get(KEY)
    benchmarks = Benchmarks(read_options(config), Turns(None if folder is None else Path(folder)))
    try:
        benchmarks.check()
    except UserError as error:
        raise pytest.UsageError(str(error)) from error
    config.stash[BENCHMARKS] = benchmarks
    if folder is None:
        config.pluginmanager.register(Receiver(benchmarks), "opgrip-receiver")
    if config.pluginmanager.hasplugin("dsession"):
        config.pluginmanager.register(SharedFolder(), "opgrip-shared-folder")


class Receiver:
    def __init__(self, benchmarks: Benchmarks) -> None:
        self._benchmarks = benchmarks

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        text = getattr(report, CARRIED, None)
        if text is not None:
            self._benchmarks.add(report.nodeid, text)


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> TraceFile | None:
    if not parent.config.getoption("--opgrip-traces"):
        return None
    return TraceFile.from_parent(parent, path=file_path) if file_path.name.endswith(SUFFIXES) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip the tests that measure times (`--opgrip-skip`), or all other tests (`--opgrip-only`)."""
    for option, skips_measuring in (("--opgrip-skip", True), ("--opgrip-only", False)):
        if config.getoption(option):
            for item in items:
                if _measures(item) == skips_measuring:
                    item.add_marker(pytest.mark.skip(reason=f"by {option}"))


def _measures(item: pytest.Item) -> bool:
    return bool({*FIXTURES} & {*getattr(item, "fixturenames", ())}) or getattr(item, "is_of_trace", False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Compare a test's results with the baseline, and fail the test if a gate fails or cannot be decided."""
    try:
        value = yield
    finally:
        if item.stash.get(RESULTS, None):
            _judge(item)
    judged = item.stash.get(JUDGED, None)
    broken = [] if judged is None else judged.broken(item.nodeid)
    if broken:
        pytest.fail("\n".join(broken), pytrace=False)
    return value


def _judge(item: pytest.Item) -> None:
    rows, header = rows_of_test(item.nodeid, item.stash[RESULTS])
    item.stash[JUDGED] = item.config.stash[BENCHMARKS].judge(rows, header, item.nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    judged = item.stash.get(JUDGED, None)
    if judged is not None and call.when == "call":
        setattr(report, CARRIED, judged.of_test(item.nodeid))
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    benchmarks = session.config.stash[BENCHMARKS]
    path = benchmarks.options.save
    if path is None or hasattr(session.config, "workerinput"):
        return
    if not benchmarks.rows:
        benchmarks.notes.append(f"{path} is not written: no test was measured")
        return
    try:
        save_rows(benchmarks.rows, benchmarks.headers, path)
    except UserError as error:
        benchmarks.notes.append(str(error))
        session.exitstatus = pytest.ExitCode.USAGE_ERROR
    else:
        benchmarks.notes.append(f"{counted(len(benchmarks.rows), 'row')} kept in {path}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    print_summary(config.stash[BENCHMARKS], terminalreporter)


SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
# options of opreplay that produce no rows, or that write a separate file per replay
REFUSED = ("sequence", "list", "output", "resume", "append")
MOST_OF_NAME = 100


class TraceTest(pytest.Item):
    is_of_trace = True

    def __init__(self, *, indices: Sequence[int], numbers: Sequence[int], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.indices, self.numbers = indices, numbers

    def runtest(self) -> None:
        assert isinstance(self.parent, TraceFile)
        judged = self.parent.judged
        self.stash[JUDGED] = judged
        rows = [row for test, row in judged.rows if test == self.nodeid]
        bad = [row for row in rows if row.status not in ("ok", "unsupported", "skipped", "contended")]
        if bad:
            pytest.fail("\n".join(map(_describe, bad)), pytrace=False)
        if all(row.status != "ok" for row in rows):
            pytest.skip(_describe(rows[0]) if rows else "not replayed")

    def reportinfo(self) -> tuple[Path, int | None, str]:
        # include the file name, because pytest shows dots as colons in a bare test name
        return self.path, None, f"{self.path.name}: {self.name}"


class TraceFile(pytest.File):
    _judged: Judged | UserError | None = None

    def collect(self) -> Iterator[TraceTest]:
        from opgrip.replay.command.run_requests import request_of
        from opgrip.replay.run.workload import load_workload

        try:
            cases = load_workload(request_of(self._job())).cases
        except UserError as error:
            raise self.CollectError(str(error)) from error
        by_name: dict[str, list[int]] = {}
        for index, name in enumerate(_names(cases, self.config.getoption("--opgrip-by"))):
            by_name.setdefault(name, []).append(index)
        for name, indices in by_name.items():
            numbers = [cases[index].number for index in indices]
            yield TraceTest.from_parent(self, name=name, indices=indices, numbers=numbers)

    @property
    def judged(self) -> Judged:
        if self._judged is None:
            try:
                self._judged = self._judge()
            except UserError as error:
                self._judged = error
        if isinstance(self._judged, UserError):
            pytest.fail(str(self._judged), pytrace=False)
        return self._judged

    def _judge(self) -> Judged:
        benchmarks = self.config.stash[BENCHMARKS]
        tests = [item for item in self.session.items if isinstance(item, TraceTest) and item.parent is self]
        indices = [index for test in tests for index in test.indices]
        with benchmarks.turns.turn():
            results = self._replay_once(min(indices), max(indices) + 1, benchmarks.turns.folder)
        test_of = {number: test.nodeid for test in tests for number in test.numbers}
        pairs = [(test_of[row.case], row) for row in results.rows if row.case in test_of]
        return benchmarks.judge(pairs, results.header, self.nodeid)

    def _replay_once(self, start: int, stop: int, folder: Path | None) -> Results:
        from opgrip.replay.cases.selection import Selection
        from opgrip.replay.command.replay import run_job
        from opgrip.replay.reports.outcome import Results

        job = self._job()
        first = job[Selection].start
        job = job.having(Selection, start=first + start, stop=first + stop)
        if folder is None:
            return run_job(job)
        path = folder / f"{hashlib.sha256(self.nodeid.encode()).hexdigest()}.json"
        if not path.exists():
            run_job(job).save(path)
        return Results.load(path)

    def _job(self) -> ReplayJob:
        from opgrip.replay.command.job import job_from_arguments, make_parser

        text = self.config.getoption("--opgrip-options")
        with redirect_stderr(io.StringIO()) as said:
            try:
                args = make_parser().parse_args([str(self.path), *shlex.split(text)])
            except (SystemExit, ValueError) as error:
                problem = said.getvalue().strip() or str(error)
                raise UserError(f"--opgrip-options={text!r}: {problem.removeprefix('opreplay: error: ')}") from error
        refused = [name for name in REFUSED if getattr(args, name)]
        if refused:
            raise UserError(f"--opgrip-options: --{refused[0]} is not allowed in a test", "use opreplay")
        options = self.config.stash[BENCHMARKS].options
        if options.repeats and args.repeats == 1:
            args.repeats, args.until_decided = options.repeats, options.compare and str(options.compare)
        return job_from_arguments(args)


def _names(cases: Sequence[Case], by: str) -> Iterator[str]:
    from opgrip.cli.terminal import shorten
    from opgrip.replay.results.results import describe_shapes

    counts: Counter[str] = Counter()
    for case in cases:
        op = shorten(case.op, MOST_OF_NAME)
        if by != CASE:
            yield op
            continue
        name = f"{op}[{shorten(describe_shapes(case.signature), MOST_OF_NAME)}]"
        counts[name] += 1
        yield name if counts[name] == 1 else f"{name}-{counts[name]}"


def _describe(row: Result) -> str:
    return f"{row.op} {row.shapes} ({row.mode}): {row.status}: {row.error or 'unknown reason'}"
