"""Quick tests that passed in the last run, which CI does not repeat after it has added packages."""

from __future__ import annotations

import pytest

KEPT = "opgrip/passed"  # key in pytest's cache


class Passed:
    """Recorder of the tests that passed in a run."""

    def __init__(self, cache: pytest.Cache) -> None:
        self._cache = cache
        self._passed: set[str] = set()
        self._failed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.add(report.nodeid)
        elif report.when == "call" and report.passed:
            self._passed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        self._cache.set(KEPT, sorted(self._passed - self._failed))


def find_passed_tests(items: list[pytest.Item], cache: pytest.Cache) -> list[pytest.Item]:
    """Return the tests in `items` that are not slow and passed in the last run."""
    passed = set(cache.get(KEPT, []))
    return [item for item in items if item.nodeid in passed and item.get_closest_marker("slow") is None]
