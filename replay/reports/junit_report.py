"""Results as JUnit XML, the format that CI services read: one test per row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any
from xml.etree import ElementTree

from opgrip.cli.command import printable
from opgrip.replay.reports.report import report
from opgrip.replay.results.results import CONTENDED, OK, SKIPPED, UNSUPPORTED, Result


@dataclass(frozen=True, slots=True)
class Test:
    """Test in a JUnit document.

    Attributes
    ----------
    group : name shown before the test's name
    outcome : `failure`, `error`, `skipped`, or empty if the test passed
    reason : explanation of the outcome
    """

    group: str
    name: str
    seconds: float = 0.0
    outcome: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Suite:
    """Tests that were run together.

    Attributes
    ----------
    properties : facts common to all tests
    """

    name: str
    tests: Sequence[Test]
    properties: Mapping[str, Any]


def write_suites(suites: Iterable[Suite], file: IO[str]) -> None:
    """Write one document of all suites."""
    root = ElementTree.Element("testsuites")
    for suite in suites:
        _add_suite(root, suite)
    ElementTree.indent(root)
    file.write('<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n")


def _add_suite(root: ElementTree.Element, suite: Suite) -> None:
    counts = {
        "tests": len(suite.tests),
        "failures": sum(test.outcome == "failure" for test in suite.tests),
        "errors": sum(test.outcome == "error" for test in suite.tests),
        "skipped": sum(test.outcome == "skipped" for test in suite.tests),
    }
    attributes = {"name": printable(suite.name), **{name: str(count) for name, count in counts.items()}}
    holder = ElementTree.SubElement(root, "testsuite", attributes)
    listed = ElementTree.SubElement(holder, "properties")
    for name, value in suite.properties.items():
        ElementTree.SubElement(listed, "property", {"name": printable(name), "value": printable(value)})
    for test in suite.tests:
        about = {"classname": printable(test.group), "name": printable(test.name), "time": f"{test.seconds:.9f}"}
        element = ElementTree.SubElement(holder, "testcase", about)
        if test.outcome:
            ElementTree.SubElement(element, test.outcome, {"message": printable(test.reason)})


@report(".xml")
def write_junit(results: Sequence[Result], header: Mapping[str, Any], file: IO[str]) -> None:
    """Write one test per row: it fails if the row is wrong, failed or timed out, and is skipped if nothing is known."""
    plain = {name: value for name, value in header.items() if isinstance(value, str | int | float)}
    write_suites([Suite(f"opreplay {header.get('trace', '')}".strip(), list(map(_test, results)), plain)], file)


def _test(row: Result) -> Test:
    outcome = "" if row.status == OK else "skipped" if row.status in (UNSUPPORTED, SKIPPED, CONTENDED) else "failure"
    seconds = (row.median_us or 0.0) / 1e6
    name = " ".join(filter(None, (row.op, row.shapes, f"({row.variant})" if row.variant else "")))
    return Test(row.mode, name, seconds, outcome, f"{row.status}: {row.error or ''}")
