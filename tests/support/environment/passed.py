"""Tests that a run leaves out: quick ones that have passed before packages were added, slow ones of another part."""

from __future__ import annotations

from argparse import ArgumentTypeError
from importlib import metadata
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

TESTS = Path(__file__).resolve().parents[2]
ROOMS = frozenset({"project", "results", "samples", "traces"})
"""Whose code knows no mode, no runtime and no source of models, as pyproject.toml's layers hold it to; or what it does
with them is left to slow tests."""
IGNORANT, ALL = "ignorant", "all"
"""Which quick tests are left out that passed: of `ROOMS`, or of all rooms."""
EVERY_PART = "every_part"
"""The marker of slow tests that each part has."""
KEPT = "opgrip/passed"
"""Where pytest's cache keeps which tests passed in the last run, and with what installed."""


class Passed:
    """Keeps which tests of a run passed.

    Parameters
    ----------
    cache : pytest's
    """

    def __init__(self, cache: pytest.Cache) -> None:
        self._cache = cache
        self._passed: set[str] = set()
        self._failed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take one part of a test: its set-up, its call or its end."""
        if report.failed:
            self._failed.add(report.nodeid)
        elif report.when == "call" and report.passed:
            self._passed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        """Keep them in the place of those of the run before."""
        self._cache.set(KEPT, {"installed": installed(), "tests": sorted(self._passed - self._failed)})


def installed() -> dict[str, str]:
    """The version of each package."""
    return {str(item.metadata["Name"]): item.version for item in metadata.distributions()}


def need_not_run_again(items: list[pytest.Item], cache: pytest.Cache, of_all_rooms: bool = False) -> list[pytest.Item]:
    """Quick tests of `ROOMS` that passed in the last run; none where a package has gone or changed since."""
    kept: dict[str, Any] = cache.get(KEPT, {})
    if not kept or not kept["installed"].items() <= installed().items():
        return []
    passed = set(kept["tests"])
    return [
        item
        for item in items
        if item.nodeid in passed
        and (of_all_rooms or not ROOMS.isdisjoint(item.path.relative_to(TESTS).parts))
        and item.get_closest_marker("slow") is None
    ]


def part(text: str) -> tuple[int, int]:
    """`K/N`: which of N parts, of which the parts 0 and N are one."""
    number, _, parts = text.partition("/")
    if not (number.isdecimal() and parts.isdecimal() and int(parts)):
        raise ArgumentTypeError(f"{text!r} is no part, as 2/3 is")
    return int(number) % int(parts), int(parts)


def of_other_parts(items: list[pytest.Item], number: int, parts: int) -> list[pytest.Item]:
    """Slow tests of all parts but one; which part a test is in, its name alone decides, unless it is in each."""
    return [
        item
        for item in items
        if item.get_closest_marker("slow") is not None
        and item.get_closest_marker(EVERY_PART) is None
        and crc32(item.nodeid.encode()) % parts != number
    ]
