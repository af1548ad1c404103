"""Tests that a run skips: quick tests that passed before packages were added, and slow tests of other parts."""

from __future__ import annotations

from argparse import ArgumentTypeError
from importlib import metadata
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

TESTS = Path(__file__).resolve().parents[2]
# Folders of tests whose quick tests do not depend on modes, runtimes or sources of models.
#
# Import layers in pyproject.toml keep the code independent of these, or slow tests cover the dependency.
INDEPENDENT_FOLDERS = frozenset({"project", "results", "samples", "traces"})
# Choices of the quick tests to skip once passed: the tests in `INDEPENDENT_FOLDERS`, or all.
IGNORANT, ALL = "ignorant", "all"
EVERY_PART = "every_part"  # marker of slow tests that run in each part
# key in pytest's cache for the tests that passed in the last run and the packages installed then
KEPT = "opgrip/passed"


class Passed:
    """Recorder of the tests that passed in a run.

    cache : pytest's cache
    """

    def __init__(self, cache: pytest.Cache) -> None:
        self._cache = cache
        self._passed: set[str] = set()
        self._failed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record the outcome of the set-up, call or tear-down of a test."""
        if report.failed:
            self._failed.add(report.nodeid)
        elif report.when == "call" and report.passed:
            self._passed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        """Replace the stored tests of the previous run."""
        self._cache.set(KEPT, {"installed": installed(), "tests": sorted(self._passed - self._failed)})


def installed() -> dict[str, str]:
    """Return the version of each installed package."""
    return {str(item.metadata["Name"]): item.version for item in metadata.distributions()}


def find_passed_tests(items: list[pytest.Item], cache: pytest.Cache, of_all_folders: bool = False) -> list[pytest.Item]:
    """Return the tests in `items` that are not slow and passed in the last run; an empty list if a package was
    removed or changed.
    """
    kept: dict[str, Any] = cache.get(KEPT, {})
    if not kept or not kept["installed"].items() <= installed().items():
        return []
    passed = set(kept["tests"])
    return [
        item
        for item in items
        if item.nodeid in passed
        and (of_all_folders or not INDEPENDENT_FOLDERS.isdisjoint(item.path.relative_to(TESTS).parts))
        and item.get_closest_marker("slow") is None
    ]


def part(text: str) -> tuple[int, int]:
    """Parse `K/N`: part K of N, where 0 and N are the same part."""
    number, _, parts = text.partition("/")
    if not (number.isdecimal() and parts.isdecimal() and int(parts)):
        raise ArgumentTypeError(f"{text!r} is not a part such as 2/3")
    return int(number) % int(parts), int(parts)


def find_tests_of_other_parts(items: list[pytest.Item], number: int, parts: int) -> list[pytest.Item]:
    """Return the slow tests of all of the `parts` parts except part `number`; a hash of its name decides a test's part.

    Tests that run in every part are left out.
    """
    return [
        item
        for item in items
        if item.get_closest_marker("slow") is not None
        and item.get_closest_marker(EVERY_PART) is None
        and crc32(item.nodeid.encode()) % parts != number
    ]
