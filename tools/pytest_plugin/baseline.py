"""The options of the pytest plug-in, its baseline files, and the summary below the test results."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from opgrip.replay.outcome import Results
    from opgrip.replay.results.results import Result
    from opgrip.tools.pytest_plugin.measured import Benchmarks, Line

CASE, OPERATOR = "case", "operator"
STORE = ".opgrip"  # default folder of baselines in pytest's root


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("opgrip", "benchmarks of operators (opgrip)")
    group.addoption("--opgrip-traces", action="store_true", help="collect trace files as tests")
    group.addoption(
        "--opgrip-by",
        choices=(CASE, OPERATOR),
        default=CASE,
        help="make one test of each case or of each operator (default: %(default)s)",
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
        help="fail a test if its results do not meet this condition: slower<=5%%, total<=5%%, op<=5%%, failed<=0, "
        "changed<=0, missing<=0; can be repeated",
    )
    group.addoption("--opgrip-only", action="store_true", help="run only tests that measure times")
    group.addoption("--opgrip-skip", action="store_true", help="skip tests that measure times")
    group.addoption("--opgrip-store", metavar="DIR", help=f"folder of baselines (default: {STORE} in pytest's root)")


@dataclass(frozen=True, slots=True)
class Options:
    """The options of the plug-in in a pytest run.

    save : baseline file to write; None for none
    compare : baseline file to compare with; None for none
    conditions : gates (conditions on the comparison) in the syntax of `opgrip compare`
    """

    save: Path | None
    compare: Path | None
    conditions: tuple[str, ...]


def read_options(config: pytest.Config) -> Options:
    """Return the options of the plug-in; raise `pytest.UsageError` if they contradict each other."""
    save, compare = config.getoption("--opgrip-save"), config.getoption("--opgrip-compare")
    store = config.getoption("--opgrip-store")
    folder = config.rootpath / STORE if store is None else Path(store).absolute()
    conditions = tuple(config.getoption("--opgrip-compare-fail"))
    if config.getoption("--opgrip-only") and config.getoption("--opgrip-skip"):
        raise pytest.UsageError("--opgrip-only and --opgrip-skip exclude all tests: use one of them")
    if conditions and compare is None:
        raise pytest.UsageError("--opgrip-compare-fail requires a baseline: add --opgrip-compare NAME")
    return Options(
        None if save is None else folder / f"{_checked(save)}.json",
        None if compare is None else _find(compare, folder),
        conditions,
    )


def _checked(name: str) -> str:
    if not name or Path(name).name != name:
        raise pytest.UsageError(
            f"{name!r} is not a name of a baseline: give a name only, and its folder with --opgrip-store"
        )
    return name


def _find(name: str, folder: Path) -> Path:
    """Return the path of a baseline, given a path or a name in `folder`; raise `pytest.UsageError` if it does not
    exist.
    """
    if Path(name).is_file():
        return Path(name).absolute()
    path = folder / f"{name}.json"
    if path.is_file():
        return path
    raise pytest.UsageError(f"{name} is neither a file nor a baseline in {folder}: save one with --opgrip-save {name}")


TESTS = "tests"  # header field with the test of each row

TestRow = tuple[str, "Result"]  # node id of a test, and a row that it measured


class StoredBaseline:
    """The rows of an earlier run, with which the rows of tests are compared.

    path : file written by `save_rows` or opreplay

    Raises UserError if the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        from opgrip.replay.outcome import read_run

        run = read_run(path)
        self.header = run.header
        self._rows = list(run.rows)
        tests = run.header.get(TESTS)
        is_ours = isinstance(tests, list) and len(tests) == len(self._rows)
        self._tests: list[str] | None = list(map(str, tests)) if is_ours and tests is not None else None

    def rows_for(self, group: str, rows: Sequence[Result]) -> list[TestRow]:
        """Return the rows of the baseline for the same cases as measured rows, each with the node id of the test that
        measured it.

        The node id is empty if the baseline is a results file of opreplay.

        group : node id of the test or test file that measured `rows`
        rows : measured rows
        """
        if self._tests is not None:
            pairs = zip(self._tests, self._rows, strict=True)
            return [(test, row) for test, row in pairs if test == group or test.startswith(f"{group}::")]
        cases = {(_case(row), row.mode) for row in rows}
        return [("", row) for row in self._rows if (_case(row), row.mode) in cases]


def _case(row: Result) -> str:
    return row.key or f"{row.op} {row.shapes}"


def save_rows(rows: Sequence[TestRow], headers: Sequence[dict[str, Any]], path: Path) -> None:
    """Write the rows of tests to a baseline file, replacing it; raise `UserError` if that fails.

    headers : headers of the replays that measured the rows
    """
    from opgrip.cli.output_files import cannot_be_written
    from opgrip.replay.outcome import write_results

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_be_written(path, error) from error
    header = join_headers(headers) | {TESTS: [test for test, _ in rows]}
    write_results([row for _, row in rows], header, path, force=True)


def join_headers(headers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one header for the results of several replays.

    A field has its value from the first header that contains it; `trace` and `device` list the values of all headers.
    """
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


def results_of(pairs: Sequence[TestRow], header: dict[str, Any]) -> Results:
    from opgrip.replay.outcome import Results

    return Results([row for _, row in pairs], header)


MOST_ROWS = 200
MOST_OF_SHAPES = 48


def print_summary(benchmarks: Benchmarks, reporter: pytest.TerminalReporter) -> None:
    """Print the measured times of all tests (`benchmarks`), the differences from the baseline's machine, the outcomes
    of gates, and notes.
    """
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
    from opgrip.replay.comparison.differences import interval_text

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
