"""The pytest plug-in: replays of traces and samples as tests, compared with a baseline.

pytest loads it in every project where opgrip is installed, so nothing heavy is imported before a test measures.
"""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from opgrip.cli.command import counted
from opgrip.errors import UserError
from opgrip.tools.pytest_plugin.baseline import add_options, read_options
from opgrip.tools.pytest_plugin.measured import (
    BENCHMARKS,
    JUDGED,
    KEY,
    RESULTS,
    Benchmarks,
    SharedFolder,
    Turns,
    opgrip_benchmark,
    opgrip_replay,
    rows_of_test,
)

if TYPE_CHECKING:
    from opgrip.tools.pytest_plugin.traces import TraceFile

__all__ = ["opgrip_benchmark", "opgrip_replay"]

FIXTURES = ("opgrip_benchmark", "opgrip_replay")
"""fixtures that measure"""
CARRIED = "opgrip_results"
"""report attribute that pytest-xdist sends to the controller"""


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
    """Collector of results from the reports of this process, or of the workers that it started."""

    def __init__(self, benchmarks: Benchmarks) -> None:
        self._benchmarks = benchmarks

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        text = getattr(report, CARRIED, None)
        if text is not None:
            self._benchmarks.add(report.nodeid, text)


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> TraceFile | None:
    """Collect trace files, if the command line asks for it."""
    if not parent.config.getoption("--opgrip-traces"):
        return None
    from opgrip.tools.pytest_plugin.traces import TraceFile, is_trace

    return TraceFile.from_parent(parent, path=file_path) if is_trace(file_path) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip the tests that measure, or all others, if the command line asks for it."""
    for option, skips_measuring in (("--opgrip-skip", True), ("--opgrip-only", False)):
        if config.getoption(option):
            for item in items:
                if _measures(item) == skips_measuring:
                    item.add_marker(pytest.mark.skip(reason=f"by {option}"))


def _measures(item: pytest.Item) -> bool:
    """Return True for a test of a trace, or one that uses a measuring fixture."""
    return bool({*FIXTURES} & {*getattr(item, "fixturenames", ())}) or getattr(item, "is_of_trace", False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Compare a test's results with the baseline, and fail the test if it breaks a gate."""
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
    """Add a test's results to its report."""
    report = yield
    judged = item.stash.get(JUDGED, None)
    if judged is not None and call.when == "call":
        setattr(report, CARRIED, judged.of_test(item.nodeid))
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Save the results as a baseline."""
    benchmarks = session.config.stash[BENCHMARKS]
    path = benchmarks.options.save
    if path is None or hasattr(session.config, "workerinput"):
        return
    if not benchmarks.rows:
        benchmarks.notes.append(f"{path} is not written: no test was measured")
        return
    from opgrip.tools.pytest_plugin.baseline import save_rows

    try:
        save_rows(benchmarks.rows, benchmarks.headers, path)
    except UserError as error:
        benchmarks.notes.append(str(error))
        session.exitstatus = pytest.ExitCode.USAGE_ERROR
    else:
        benchmarks.notes.append(f"{counted(len(benchmarks.rows), 'row')} kept in {path}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the table of measured rows after the tests."""
    from opgrip.tools.pytest_plugin.baseline import print_summary

    print_summary(config.stash[BENCHMARKS], terminalreporter)
