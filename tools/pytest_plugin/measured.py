"""The results of tests, and the fixtures with which tests measure times."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from opgrip.tools.pytest_plugin.baseline import Options, StoredBaseline, TestRow, join_headers, results_of

if TYPE_CHECKING:
    from opgrip.replay.comparison import Comparison
    from opgrip.replay.comparison.comparison import Pair
    from opgrip.replay.comparison.gate import Gate, Held
    from opgrip.replay.outcome import Results
    from opgrip.replay.results.results import Result


KEY = "opgrip_folder"


class Turns:
    """A lock that all workers of a pytest-xdist run share, so that only one of them measures at a time.

    folder : folder that all workers share; None if tests run in one process
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait until no other worker measures, and prevent others from measuring during the block."""
        if self.folder is None:
            yield
            return
        import fcntl

        with (self.folder / "turn").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                # closing the file would not release the lock, since a forked process may also have it open
                fcntl.flock(file, fcntl.LOCK_UN)


class SharedFolder:
    """Plug-in for the process that starts pytest-xdist's workers: it passes all of them the path of one temporary
    folder.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="opgrip-pytest-")

    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput[KEY] = self._folder.name

    def pytest_unconfigure(self) -> None:
        self._folder.cleanup()


ADDED, FAILED, CHANGED = "ADDED", "FAILED", "CHANGED"


@dataclass(frozen=True, slots=True)
class Line:
    """A row of the table that is printed below the test results.

    base_us : median in the baseline; None if it has no time
    ratio, low, high : time divided by the baseline's, and the interval of this ratio; None if either has no time
    verdict : verdict of the comparison; empty without a baseline
    reason : why the comparison is inconclusive, such as a busy machine
    """

    op: str
    shapes: str
    mode: str
    status: str
    median_us: float | None
    base_us: float | None = None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    verdict: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Judged:
    """The rows of tests that were measured together, compared with the baseline.

    rows, base_rows : (test, row) of the measured rows, and of the baseline's rows
    header : header of the measured results
    comparison : comparison of both; None without a baseline
    held : outcomes of the gates
    """

    rows: Sequence[TestRow]
    header: dict[str, Any]
    base_rows: Sequence[TestRow] = ()
    comparison: Comparison | None = None
    held: Sequence[Held] = ()

    def broken(self, test: str) -> list[str]:
        """Return a line for each gate that failed or is undecided because of rows of this test, or because of the
        total.
        """
        own = {id(row) for name, row in (*self.rows, *self.base_rows) if name == test}
        return [
            item.line
            for item in self.held
            if item.outcome.exit_status and (not item.rows or any(id(row) in own for row in item.rows))
        ]

    def of_test(self, test: str) -> str:
        """Return the results of one test as JSON, for its report, which pytest-xdist sends from worker to
        controller.
        """
        rows = [row for name, row in self.rows if name == test]
        lines = [asdict(line) for line in self._lines(rows)]
        # without rows in the baseline, all facts would differ
        differs = list(self.comparison.differs) if self.comparison is not None and self.base_rows else []
        cells = [row.to_plain() for row in rows]
        gates = [item.line for item in self.held]
        return json.dumps({"header": self.header, "rows": cells, "lines": lines, "differs": differs, "gates": gates})

    def _lines(self, rows: Sequence[Result]) -> list[Line]:
        pairs, words = {}, {}
        if self.comparison is not None:
            pairs = {id(pair.new): pair for pair in self.comparison.pairs}
            words = {key: pair.verdict.value for key, pair in pairs.items()}
            words |= {id(row): ADDED for row in self.comparison.added}
            words |= {id(pair.new): CHANGED for pair in self.comparison.changed}
            words |= {id(pair.new): FAILED for pair in self.comparison.broken}
        return [_line(row, pairs.get(id(row)), words.get(id(row), "")) for row in rows]


def _line(row: Result, pair: Pair | None, verdict: str) -> Line:
    line = Line(row.op, row.shapes, row.mode, row.status, row.median_us, verdict=verdict)
    if pair is None or pair.judgement is None:
        return line
    judgement = pair.judgement
    ratios = {name: getattr(judgement, name) for name in ("ratio", "low", "high")}
    return replace(line, base_us=pair.base.median_us, reason=pair.reason, **ratios)


@dataclass
class Benchmarks:
    """The results of all tests of a pytest run.

    options : options of the plug-in
    turns : lock that lets one worker measure at a time
    rows : (test, row) of all finished tests
    headers : headers of the replays that measured them
    lines : rows of the printed table
    differs : settings in which the run differs from the baseline, as (baseline's value, current value) by name
    notes : additional lines below the table
    gate_lines : distinct lines with outcomes of gates, in order
    """

    options: Options
    turns: Turns
    rows: list[TestRow] = field(default_factory=list)
    headers: list[dict[str, Any]] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    differs: dict[str, tuple[str, str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    gate_lines: dict[str, None] = field(default_factory=dict)

    def check(self) -> None:
        """Raise `UserError` if a condition of `--opgrip-compare-fail` is invalid, or the baseline cannot be read."""
        if self.options.compare is not None:
            _ = self.gates, self.baseline

    @cached_property
    def gates(self) -> list[Gate]:
        """Return the gates that the options describe; raise `UserError` for an invalid condition."""
        # the import below loads pandas
        if not self.options.conditions:
            return []
        from opgrip.replay.comparison.gate import parse_gate

        return list(map(parse_gate, self.options.conditions))

    @cached_property
    def baseline(self) -> StoredBaseline | None:
        """Return the baseline to compare with; raise `UserError` if it cannot be read."""
        return None if self.options.compare is None else StoredBaseline(self.options.compare)

    def judge(self, pairs: Sequence[TestRow], header: dict[str, Any], group: str) -> Judged:
        """Compare measured rows with the baseline's rows for the same tests, and check the gates.

        pairs : (test, row) of the measured rows
        header : header of the measured results
        group : node id of the test or test file
        """
        if self.baseline is None:
            return Judged(pairs, header)
        from opgrip.replay.comparison import compare
        from opgrip.replay.comparison.gate import hold_all, margin_for

        base_rows = self.baseline.rows_for(group, [row for _, row in pairs])
        base, new = results_of(base_rows, self.baseline.header), results_of(pairs, header)
        comparison = compare(base, new, margin_for(self.gates))
        return Judged(pairs, header, base_rows, comparison, hold_all(self.gates, comparison))

    def add(self, test: str, text: str) -> None:
        """Add the results of a test from its report.

        test : node id of the test
        text : JSON text that `Judged.of_test` returned
        """
        from opgrip.replay.results.results import Result

        carried = json.loads(text)
        self.headers.append(carried["header"])
        self.rows += [(test, Result.from_plain(cells)) for cells in carried["rows"]]
        self.lines += [Line(**line) for line in carried["lines"]]
        self.gate_lines |= dict.fromkeys(carried["gates"])
        self.differs |= {name: (old, now) for name, old, now in carried["differs"]}


def rows_of_test(test: str, results: Sequence[Results]) -> tuple[list[TestRow], dict[str, Any]]:
    """Return (test, row) of all rows that a test measured, and one header for them.

    results : results of each measurement of the test
    """
    return [(test, row) for item in results for row in item.rows], join_headers([item.header for item in results])


BENCHMARKS = pytest.StashKey[Benchmarks]()  # results of the run
JUDGED = pytest.StashKey[Judged]()  # compared rows of a test that measured something


RESULTS: pytest.StashKey[Sequence[Results]] = pytest.StashKey()  # results of a test's fixture calls


@pytest.fixture
def opgrip_replay(request: pytest.FixtureRequest) -> Callable[..., Results]:
    """Return a function that replays a trace or samples, with the options of `opgrip.replay.replay`.

    ::

        def test_detector(opgrip_replay):
            results = opgrip_replay("traces/faster_rcnn.jsonl", op=["aten.convolution*"], repeats=3)
            assert all(row.status == "ok" for row in results)
    """

    def run(trace: str | Path, **options: Any) -> Results:
        from opgrip.replay import replay

        return _measure(request.node, replay, trace, **options)

    return run


@pytest.fixture
def opgrip_benchmark(request: pytest.FixtureRequest) -> Callable[..., Results]:
    """Return a function that times functions on inputs, with the options of `opgrip.replay.benchmark`.

    ::

        def test_gelu(opgrip_benchmark):
            opgrip_benchmark(torch.nn.functional.gelu, [[(8, 512)], [(64, 512)]], mode=["eager", "compile"])
    """

    def run(
        function: Callable[..., Any] | Sequence[Callable[..., Any]], inputs: Sequence[Any], **options: Any
    ) -> Results:
        from opgrip.replay import benchmark

        return _measure(request.node, benchmark, function, inputs, **options)

    return run


def _measure(item: pytest.Item, measure: Callable[..., Results], *args: Any, **options: Any) -> Results:
    with item.config.stash[BENCHMARKS].turns.turn():
        results = measure(*args, **options)
    item.stash[RESULTS] = [*item.stash.get(RESULTS, ()), results]
    return results
