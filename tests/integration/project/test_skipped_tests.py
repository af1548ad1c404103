"""Tests of skipping: after new packages only quick tests that passed are skipped; slow tests run in parts."""

from __future__ import annotations

from argparse import ArgumentTypeError
from types import SimpleNamespace
from typing import Any

import passed
import pytest
from passed import KEPT, TESTS, Passed, find_passed_tests, find_tests_of_other_parts, part

INSTALLED = {"torch": "2.13.0", "numpy": "2.1.0"}


class Cache(dict[str, Any]):
    """Part of pytest's cache that is used: a dictionary."""

    set = dict.__setitem__


def item(name: str, *marks: str) -> Any:
    """Return a test item of a name such as `traces/test_reader.py::test_one`."""
    return SimpleNamespace(
        nodeid=f"tests/{name}",
        path=TESTS / name.partition("::")[0],
        get_closest_marker=lambda mark: mark if mark in marks else None,
    )


def report(name: str, outcome: str, when: str = "call") -> Any:
    return SimpleNamespace(
        nodeid=f"tests/{name}", when=when, failed=outcome == "failed", passed=outcome == "passed", outcome=outcome
    )


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the cache after a run with one test of each kind."""
    monkeypatch.setattr(passed, "installed", lambda: INSTALLED)
    cache = Cache()
    plugin = Passed(cache)  # type: ignore[arg-type]
    for name in ("traces/test_a.py::passes", "samples/test_a.py::passes", "replay/test_a.py::passes"):
        plugin.pytest_runtest_logreport(report(name, "passed", "setup"))
        plugin.pytest_runtest_logreport(report(name, "passed"))
    plugin.pytest_runtest_logreport(report("traces/test_a.py::is_skipped", "skipped", "setup"))
    plugin.pytest_runtest_logreport(report("traces/test_a.py::fails", "failed"))
    plugin.pytest_runtest_logreport(report("traces/test_a.py::fails_at_its_end", "passed"))
    plugin.pytest_runtest_logreport(report("traces/test_a.py::fails_at_its_end", "failed", "teardown"))
    plugin.pytest_sessionfinish()
    assert set(cache) == {KEPT}
    return cache


def test_passed_tests_unrelated_to_new_packages_are_skipped(cache: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passed, "installed", lambda: INSTALLED | {"jax": "0.10.2"})
    of_another_folder = item("replay/test_a.py::passes")
    again = [
        *(item(f"traces/test_a.py::{name}") for name in ("is_skipped", "fails", "fails_at_its_end", "is_new")),
        of_another_folder,
        item("traces/test_a.py::passes", "slow"),
    ]
    left_out = [item("traces/test_a.py::passes"), item("samples/test_a.py::passes")]
    assert find_passed_tests([*again, *left_out], cache) == left_out
    assert find_passed_tests([*again, *left_out], cache, of_all_folders=True) == [of_another_folder, *left_out]


@pytest.mark.parametrize("installed", [{"torch": "2.13.0"}, INSTALLED | {"numpy": "2.2.0"}])
def test_every_test_runs_after_a_package_was_removed_or_changed(
    installed: dict[str, str], cache: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passed, "installed", lambda: installed)
    assert find_passed_tests([item("traces/test_a.py::passes")], cache) == []


def test_every_test_runs_without_an_earlier_run() -> None:
    assert find_passed_tests([item("traces/test_a.py::passes")], Cache()) == []  # type: ignore[arg-type]


def test_each_slow_test_is_in_exactly_one_part() -> None:
    items = [item(f"replay/test_a.py::test_{number}", "slow") for number in range(90)]
    quick = item("replay/test_a.py::is_quick")
    left_out = [find_tests_of_other_parts([*items, quick], *part(f"{number}/3")) for number in (1, 2, 3)]
    assert all(quick not in others for others in left_out)
    taken = [test for others in left_out for test in items if test not in others]
    assert sorted(test.nodeid for test in taken) == sorted(test.nodeid for test in items)
    assert all(15 < len(items) - len(others) < 45 for others in left_out)
    for number in (1, 2, 3):
        promised = item("tools/test_zoo.py::test_comes_out_the_same", "slow", "every_part")
        assert find_tests_of_other_parts([promised, *items], *part(f"{number}/3")) == left_out[number - 1]
    for text in ("1", "a/2", "1/0", "-1/3"):
        with pytest.raises(ArgumentTypeError, match="is not a part"):
            part(text)
