"""Tests that benchmarks report contention instead of printing meaningless numbers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd
import pytest
from capture_overhead import EMPTY, EXECUTION_TRACE, NATIVE, OBSERVERS, OPGRIP, STEPS, Watch, Watches, table
from capture_truth import FIGURES, LEAST_US, Times, compare_quiet, errors, halves
from others import DISTURBED, TRIES, Part, Usage, measure_part
from replay_fidelity import COLUMNS, _row

QUIET, BUSY = Part(0.0, 0.01), Part(0.0, 0.4)


def usages(*shares_of_others: float) -> Iterator[Usage]:
    """Yield processor usage before and after parts in which other processes used the given shares."""
    whole_s = busy_s = 0.0
    for share in shares_of_others:
        yield Usage(whole_s, busy_s, 0.0)
        whole_s, busy_s = whole_s + 100, busy_s + 100 * share
        yield Usage(whole_s, busy_s, 0.0)


@pytest.mark.parametrize(
    ("shares", "value", "is_disturbed"),
    [
        pytest.param([0.05], 1, False, id="quiet at once"),
        pytest.param([0.5, 0.2, 0.05], 3, False, id="quiet later"),
        pytest.param([0.5, 0.2, 0.3], 2, True, id="never quiet"),
    ],
)
def test_disturbed_part_is_measured_again(shares: list[float], value: int, is_disturbed: bool) -> None:
    tries = iter(range(1, TRIES + 1))
    part = measure_part(lambda: next(tries), TRIES, usages(*shares).__next__)
    assert (part.value, part.is_disturbed) == (value, is_disturbed)
    assert part.others == pytest.approx(min(shares))
    assert len(list(tries)) == TRIES - len(shares)


def program(rng: np.random.Generator, rounds: int) -> list[Times]:
    """Return times of thirty operators with random variation only."""
    return [{f"op{number}": [*(1000 + rng.normal(size=3))] for number in range(30)} for _ in range(rounds)]


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [2, 5, 6])
def test_capture_equal_to_the_profiler_is_at_the_noise_floor(rounds: int) -> None:
    rng = np.random.default_rng(0)
    ops = [f"op{number}" for number in range(30)]
    pairs = [errors(program(rng, rounds), program(rng, rounds), ops) for _ in range(100)]
    capture_off, floor = np.mean(pairs, axis=0)
    assert capture_off / floor == pytest.approx(1, abs=0.06)


def test_halves_have_equal_size_and_a_bounded_number() -> None:
    assert halves(2) == [((0,), (1,)), ((1,), (0,))]
    assert all(len(half) == len(rest) == 8 and {*half, *rest} == set(range(16)) for half, rest in halves(16))
    assert len(halves(16)) < 100


def test_program_with_mostly_disturbed_rounds_has_no_figures() -> None:
    times: Times = {"aten::mm": [2 * LEAST_US] * 3}
    quiet, busy = Part((times, times), 0.0), Part((times, times), 0.5)
    assert compare_quiet([quiet, quiet, busy])[0] == ("1", "100%", "0.0%", "0.0%", "0.00")
    assert compare_quiet([quiet, busy, busy]) == ((DISTURBED,) * len(FIGURES), [])


def test_observer_with_mostly_disturbed_watches_has_no_figures() -> None:
    watch = {NATIVE: Watch((1.0,) * STEPS, 0.0), EMPTY: Watch((1.5,) * STEPS, 0.0)}
    watches: Watches = {observer: [watch.get(observer, Watch((2.0,) * STEPS, 2.0))] * 3 for observer in OBSERVERS}
    watches[OPGRIP] = [None, None, watches[OPGRIP][2]]
    watches[EXECUTION_TRACE] = [None, *watches[EXECUTION_TRACE][1:]]
    nothing = dict.fromkeys(OBSERVERS, 0.0)
    rows = table("program", watches, dict.fromkeys(OBSERVERS, (0, 0)), nothing, 1_000_000)
    cells = {str(row[0]): row[1:] for row in zip(*(column.cells for column in rows.columns), strict=True)}
    assert cells[OPGRIP] == (*(DISTURBED, "-") * 3, "-", DISTURBED, "-", "-", "+0")
    assert cells[EXECUTION_TRACE] == (*("1.0", "1.00") * 3, "2.00", "0.1", "-", "-", "+0")
    assert rows.caption == "others took processors in 3 of 24 watches, which are left out"


@pytest.mark.parametrize(
    ("rows", "floor", "cells"),
    [
        (QUIET, QUIET, ["10.0%", "2.00"]),
        (QUIET, BUSY, ["10.0%", DISTURBED]),
        (BUSY, QUIET, [DISTURBED, DISTURBED]),
    ],
)
def test_disturbed_replay_has_shapes_and_no_error_figure(
    rows: Part[float], floor: Part[float], cells: list[str]
) -> None:
    captured = pd.DataFrame({"count": [2], "us": [100.0]})
    frame = pd.DataFrame({"case": [0], "median_us": [110.0], "faithful": [True]})
    row = _row("replay", captured, Part(frame, rows.others), Part(0.05, floor.others), "-")
    assert len(row) == len(COLUMNS)
    assert list(row) == ["", "", "", "replay", "100.00%", *cells, "-"]
