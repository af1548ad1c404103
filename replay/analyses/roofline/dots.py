"""The dots of a roofline, and their numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import hypot
from typing import TYPE_CHECKING, Any

from opgrip.replay.analyses.roofline.legends import COLORS
from opgrip.replay.analyses.roofline.limits import LimitColumns
from opgrip.replay.results.results import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SMALLEST, LARGEST = 9.0, 1200.0
"""Areas of the dot of a case that takes next to no time, and of one that takes all of it, in square points."""
APART = 9.0
"""Points between the middles of two numbers that do not run over each other."""

STYLE: dict[str, Any] = {"alpha": 0.6, "linewidths": 0.5, "edgecolors": "white", "in_layout": False, "zorder": 3}

Dot = tuple[float, float, Result]
"""Where it is, and its row."""


def time_of(row: Result) -> float:
    """Of all calls, in us."""
    return row.count * (row.median_us or 0.0)


def add_dots(axes: Axes, dots: Sequence[Dot], total: float) -> None:
    """The large ones first, so that none hides a smaller one."""
    for place, (x, y, row) in enumerate(_ordered(dots)):
        area = SMALLEST + time_of(row) / total * (LARGEST - SMALLEST)
        color = COLORS.get(LimitColumns.of(row).bound or "", "#888888")
        style: dict[str, Any] = {
            "alpha": 0.6,
            "linewidths": 0.5,
            "edgecolors": "white",
            "in_layout": False,
            "zorder": 3,
        }
        axes.scatter([x], [y], area, color=color, gid=f"dot {place}", **style)


def add_numbers(axes: Axes, dots: Sequence[Dot], key: Mapping[str, int]) -> None:
    """Its number of the key to the largest dot of each operator."""
    places: list[tuple[float, float]] = []
    numbered: set[str] = set()
    for x, y, row in _ordered(dots):
        if row.op in key and row.op not in numbered:
            numbered.add(row.op)
            _add_number(axes, x, y, key[row.op], places)


def _ordered(dots: Sequence[Dot]) -> list[Dot]:
    return sorted(dots, key=lambda dot: -time_of(dot[2]))


def _add_number(axes: Axes, x: float, y: float, number: int, places: list[tuple[float, float]]) -> None:
    """A number on its dot, or beside it where another one is there."""
    point = axes.transData.transform((x, y)) * 72 / axes.figure.dpi
    steps = [(0, 0), *((radius * a, radius * b) for radius in (1, 2, 3) for a, b in _AROUND)]
    for across, up in steps:
        place = point[0] + across * APART, point[1] + up * APART
        if all(hypot(place[0] - other[0], place[1] - other[1]) >= APART for other in places):
            break
    places.append(place)
    offset = across * APART, up * APART
    line = {"arrowstyle": "-", "linewidth": 0.5} if (across, up) != (0, 0) else None
    axes.annotate(str(number), (x, y), offset, textcoords="offset points", ha="center", va="center", fontsize=7,
                  fontweight="bold", zorder=4, arrowprops=line)  # fmt: skip


_AROUND = ((1, 1), (-1, 1), (1, -1), (-1, -1), (0, 1.2), (1.2, 0), (0, -1.2), (-1.2, 0))
