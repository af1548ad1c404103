"""Parameters of which the quick tests run a few."""

from collections.abc import Iterable
from typing import Any

import pytest


def slow_except(quick: Iterable[Any], values: Iterable[Any]) -> list[Any]:
    """Return the values of a parameter, each marked as slow unless it is one of the `quick`."""
    quick, values = list(quick), list(values)
    assert all(value in values for value in quick)
    return [value if value in quick else pytest.param(value, marks=pytest.mark.slow) for value in values]
