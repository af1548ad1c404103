"""The options of the pytest plug-in, its baselines and fixtures, and the results of a run with their summary."""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from opgrip.replay.reports.comparison.comparison import Comparison, Gate, Held, Pair
    from opgrip.replay.reports.outcome import Results
    from opgrip.replay.results.results import Result


CASE, OPERATOR = "case", "operator"
MOST_REPEATS = 20
STORE = ".opgrip"  # default folder of baselines in pytest's root


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("opgrip", "benchmarks of operators (opgrip)")
    group.addoption("--opgrip-traces", action="store_true", help="collect trace files as tests")
    group.addoption(
        "--opgrip-by",
        choices=(CASE, OPERATOR),
        default=CASE,
        help="make one test for each case or for each operator (default: %(default)s)",
    )
    group.addoption(
        "--opgrip-options",
        default="",
        metavar="OPTIONS",
        help="options of opreplay for the replays, such as --opgrip-options='--repeats 5 --top 20'",
    )
    group.addoption("--opgrip-save", metavar="NAME", help="save the results as a baseline with this name")
    group.addoption(
        "--opgrip-compare",
        metavar="NAME|FILE",
        help="compare the results with a saved baseline, or a results file of opreplay",
    )
    group.addoption(
        "--opgrip-compare-fail",
        action="append",
        default=[],
        metavar="CONDITION",
        help="fail a test if this limit is exceeded: slower<=5%% (slowdown of any row), total<=5%% (of all together), "
        "op<=5%% (of an operator), failed<=0 (rows that no longer run), changed<=0 (rows whose results changed), "
        "missing<=0 (rows that were not measured); can be repeated",
    )
    group.addoption(
        "--opgrip-fail-undecided", action="store_true", help="also fail a test if a condition is not decided"
    )
    group.addoption(
        "--opgrip-repeats",
        type=int,
        metavar="N",
        help=f"repeat each measurement N times, and up to {MOST_REPEATS} times if a condition is not decided",
    )
    group.addoption("--opgrip-only", action="store_true", help="run only tests that measure times")
    group.addoption("--opgrip-skip", action="store_true", help="skip tests that measure times")
    group.addoption("--opgrip-store", metavar="DIR", help=f"folder of baselines (default: {STORE} in pytest's root)")


@dataclass(frozen=True, slots=True)
class Options:
    """The options of the plug-in; `conditions` are gates in the syntax of `opgrip compare`."""

    save: Path | None
    compare: Path | None
    conditions: tuple[str, ...]
    fail_undecided: bool
    repeats: int | None


def read_options(config: pytest.Config) -> Options:
    save, compare = config.getoption("--opgrip-save"), config.getoption("--opgrip-compare")
    store = config.getoption("--opgrip-store")
    folder = config.rootpath / STORE if store is None else Path(store).absolute()
    conditions = tuple(config.getoption("--opgrip-compare-fail"))
    if config.getoption("--opgrip-only") and config.getoption("--opgrip-skip"):
        raise pytest.UsageError("--opgrip-only and --opgrip-skip exclude all tests: use one of them")
    if conditions and compare is None:
        raise pytest.UsageError("--opgrip-compare-fail requires a baseline: add --opgrip-compare NAME")
    if save is not None and (not save or Path(save).name != save):
        raise pytest.UsageError(
            f"{save!r} is not the name of a baseline: choose a name, and its folder with --opgrip-store"
        )
    return Options(
        None if save is None else folder / f"{save}.json",
        None if compare is None else _find(compare, folder),
        conditions,
        config.getoption("--opgrip-fail-undecided"),
        config.getoption("--opgrip-repeats"),
    )


def _find(name: str, folder: Path) -> Path:
    if Path(name).is_file():
        return Path(name).absolute()
    path = folder / f"{name}.json"
    if path.is_file():
        return path
    raise pytest.UsageError(f"{name} is neither a file nor a baseline in {folder}: save one with --opgrip-save {name}")


TESTS = "tests"  # header field with the test of each row

TestRow = tuple[str, "Result"]  # node id of a test, and a row that it measured


class StoredBaseline:
    def __init__(self, path: Path) -> None:
        from opgrip.replay.reports.outcome import Results

        run = Results.load(path)
        self.header = run.header
        self._rows = list(run.rows)
        tests = run.header.get(TESTS)
        is_ours = isinstance(tests, list) and len(tests) == len(self._rows)
        self._tests: list[str] | None = list(map(str, tests)) if is_ours and tests is not None else None

    def rows_for(self, group: str, rows: Sequence[Result]) -> list[TestRow]:
        if self._tests is not None:
            pairs = zip(self._tests, self._rows, strict=True)
            return [(test, row) for test, row in pairs if test == group or test.startswith(f"{group}::")]
        cases = {(_case(row), row.mode) for row in rows}
        return [("", row) for row in self._rows if (_case(row), row.mode) in cases]


def _case(row: Result) -> str:
    return row.key or f"{row.op} {row.shapes}"


def save_rows(rows: Sequence[TestRow], headers: Sequence[dict[str, Any]], path: Path) -> None:
    from opgrip.cli.output_files import cannot_be_written
    from opgrip.replay.reports.outcome import write_results

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_be_written(path, error) from error
    header = join_headers(headers) | {TESTS: [test for test, _ in rows]}
    write_results([row for _, row in rows], header, path, force=True)


def join_headers(headers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    joined: dict[str, Any] = {}
    for header in reversed(headers):
        joined |= header
    for name in ("trace", "device"):
        values = dict.fromkeys(str(header[name]) for header in headers if name in header)
        if values:
            joined[name] = ", ".join(values)
    if len({header.get("trace_hash") for header in headers}) > 1:
        joined.pop("trace_hash", None)
    return joined


MOST_ROWS = 200
MOST_OF_SHAPES = 48


def print_summary(benchmarks: Benchmarks, reporter: pytest.TerminalReporter) -> None:
    if not benchmarks.lines and not benchmarks.notes:
        return
    compared = benchmarks.options.compare
    reporter.section("opgrip" if compared is None else f"opgrip, against {compared.stem}")
    for name, (old, now) in benchmarks.differs.items():
        reporter.write_line(f"{name} differs: {old} in the baseline, {now} now", yellow=True)
    if benchmarks.lines:
        for text in _table(benchmarks.lines[:MOST_ROWS], compared is not None):
            reporter.write_line(text)
    if len(benchmarks.lines) > MOST_ROWS:
        reporter.write_line(f"and {len(benchmarks.lines) - MOST_ROWS:,} more rows, which are not printed")
    for line in benchmarks.gate_lines:
        reporter.write_line(line)
    for note in benchmarks.notes:
        reporter.write_line(note)


def _table(lines: list[Line], is_compared: bool) -> list[str]:
    from opgrip.display.tables import TableColumn, print_table
    from opgrip.replay.reports.comparison.unpaired_ratio import interval_text

    def column(heading: str, value: str | Callable[[Line], object], form: str = "", **options: Any) -> TableColumn:
        return TableColumn(heading, value, form, most=MOST_OF_SHAPES, **options)

    has_modes = len({line.mode for line in lines}) > 1
    columns = [
        column("operator", "op"),
        column("shapes", "shapes"),
        column("mode", "mode", when=lambda _: has_modes),
        column("median us", "median_us", ",.2f"),
    ]
    if is_compared:
        columns += [
            column("baseline us", "base_us", ",.2f"),
            column("ratio", "ratio", ",.3f"),
            column(
                "95% interval", lambda line: interval_text(line.low, line.high) if line.low and line.high else None, ">"
            ),
            column("verdict", "verdict"),
        ]
    columns.append(column("because", "reason", when=lambda line: line.reason))
    columns.append(column("status", "status", when=lambda line: line.status != "ok"))
    file = io.StringIO()
    print_table(columns, lines, file)
    return file.getvalue().strip("\n").splitlines()


KEY = "opgrip_folder"


class Turns:
    """A lock that all workers of a pytest-xdist run share, so that only one of them measures at a time."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    @contextmanager
    def turn(self) -> Iterator[None]:
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
    """Plug-in that passes the path of one temporary folder to all workers of pytest-xdist."""

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

    ratio, low, high : time divided by the baseline's, and the interval of this ratio
    reason : why the interval is wide, such as a busy machine
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
    rows: Sequence[TestRow]
    header: dict[str, Any]
    base_rows: Sequence[TestRow] = ()
    comparison: Comparison | None = None
    held: Sequence[Held] = ()
    fails_undecided: bool = False

    def broken(self, test: str) -> list[str]:
        own = {id(row) for name, row in (*self.rows, *self.base_rows) if name == test}
        return [
            item.line
            for item in self.held
            if (item.outcome.exit_status == 1 or (item.outcome.exit_status and self.fails_undecided))
            and (not item.rows or any(id(row) in own for row in item.rows))
        ]

    def of_test(self, test: str) -> str:
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

    differs : settings in which the run differs from the baseline, as (baseline's value, current value) by name
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
        if self.options.compare is not None:
            _ = self.gates, self.baseline

    @cached_property
    def gates(self) -> list[Gate]:
        # the import below loads pandas
        if not self.options.conditions:
            return []
        from opgrip.replay.reports.comparison.comparison import parse_gate

        return list(map(parse_gate, self.options.conditions))

    @cached_property
    def baseline(self) -> StoredBaseline | None:
        return None if self.options.compare is None else StoredBaseline(self.options.compare)

    def judge(self, pairs: Sequence[TestRow], header: dict[str, Any], group: str) -> Judged:
        if self.baseline is None:
            return Judged(pairs, header)
        from opgrip.replay.reports.comparison.comparison import compare, hold_all, margin_for
        from opgrip.replay.reports.outcome import Results

        base_rows = self.baseline.rows_for(group, [row for _, row in pairs])
        base = Results([row for _, row in base_rows], self.baseline.header)
        new = Results([row for _, row in pairs], header)
        comparison = compare(base, new, margin_for(self.gates))
        words = ("replay both with --repeats", "measure both with --opgrip-repeats")
        held = [replace(item, reason=item.reason.replace(*words)) for item in hold_all(self.gates, comparison)]
        return Judged(pairs, header, base_rows, comparison, held, self.options.fail_undecided)

    def needs_more(self, results: Results, test: str) -> bool:
        judged = self.judge(*rows_of_test(test, [results]), test)
        if judged.comparison is None or max(len(row.repeats or (1,)) for row in results) >= MOST_REPEATS:
            return False
        # the baseline does not change, so repeats cannot decide a row that it measured only once
        can_be_decided = any(pair.more_new_runs is not None for pair in judged.comparison.pairs)
        return can_be_decided and any(item.outcome.exit_status == 3 for item in judged.held)

    def add(self, test: str, text: str) -> None:
        from opgrip.replay.results.results import Result

        carried = json.loads(text)
        self.headers.append(carried["header"])
        self.rows += [(test, Result.from_plain(cells)) for cells in carried["rows"]]
        self.lines += [Line(**line) for line in carried["lines"]]
        self.gate_lines |= dict.fromkeys(carried["gates"])
        self.differs |= {name: (old, now) for name, old, now in carried["differs"]}


def rows_of_test(test: str, results: Sequence[Results]) -> tuple[list[TestRow], dict[str, Any]]:
    return [(test, row) for item in results for row in item.rows], join_headers([item.header for item in results])


BENCHMARKS = pytest.StashKey[Benchmarks]()  # results of the run
JUDGED = pytest.StashKey[Judged]()  # compared rows of a test that measured something


RESULTS: pytest.StashKey[Sequence[Results]] = pytest.StashKey()  # results of a test's fixture calls


@pytest.fixture
def opgrip_replay(request: pytest.FixtureRequest) -> Callable[..., Results]:
    """Return a function that replays a trace or samples, with the arguments and results of `opgrip.replay.replay`."""

    def run(trace: str | Path, **options: Any) -> Results:
        from opgrip.replay import replay

        return _measure(request.node, replay, trace, **options)

    return run


@pytest.fixture
def opgrip_benchmark(request: pytest.FixtureRequest) -> Callable[..., Results]:
    """Return a function that times functions on inputs, with the arguments and results of `opgrip.replay.benchmark`."""

    def run(
        function: Callable[..., Any] | Sequence[Callable[..., Any]], inputs: Sequence[Any], **options: Any
    ) -> Results:
        from opgrip.replay import benchmark

        return _measure(request.node, benchmark, function, inputs, **options)

    return run


def _measure(item: pytest.Item, measure: Callable[..., Results], *args: Any, **options: Any) -> Results:
    from opgrip.replay.reports.comparison.results_store import merge_runs

    benchmarks = item.config.stash[BENCHMARKS]
    if benchmarks.options.repeats and not options.get("sequence"):
        options = {"repeats": benchmarks.options.repeats, **options}
    with benchmarks.turns.turn():
        results = measure(*args, **options)
        while "repeats" in options and "output" not in options and benchmarks.needs_more(results, item.nodeid):
            results = merge_runs([results, measure(*args, **options)])
    item.stash[RESULTS] = [*item.stash.get(RESULTS, ()), results]
    return results
