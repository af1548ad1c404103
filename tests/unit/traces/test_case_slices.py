"""Slices of a large number of cases."""

from __future__ import annotations

import pytest

from opgrip.cli.option_types import Cut
from opgrip.errors import UserError

HUGE = 10**30


@pytest.mark.parametrize(
    ("cut", "places"),
    [
        (Cut(), [0, 1, 2, 3, 4]),
        (Cut(2), [2, 3, 4]),
        (Cut(1, 3), [1, 2]),
        (Cut(3, 99), [3, 4]),
        (Cut(1, 4, 9), [1, 2, 3]),
    ],
)
def test_slice_contains_start_and_excludes_stop(cut: Cut, places: list[int]) -> None:
    assert list(cut.places(5)) == places
    assert cut.size(5) == len(places)


@pytest.mark.parametrize("count", [1000, HUGE])
def test_sample_is_reproducible_by_seed_and_sorted(count: int) -> None:
    places = list(Cut(10, None, 7, 3).places(count))
    assert places == list(Cut(10, None, 7, 3).places(count)) == sorted(set(places))
    assert len(places) == 7
    assert all(10 <= place < count for place in places)
    assert places != list(Cut(10, None, 7, 4).places(count))


def test_empty_slice_is_an_error_with_the_number_of_cases() -> None:
    with pytest.raises(UserError, match="no case is left from --start 5 to --stop 9: the file has 5 cases, numbered"):
        Cut(5, 9).places(5)
    assert list(Cut().places(0)) == []
