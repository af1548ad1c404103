"""The dots of a roofline, their numbers, and its legends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from math import hypot
from typing import TYPE_CHECKING, Any

from opgrip.cli.plugins import needed
from opgrip.display.figures import PALETTE, literal
from opgrip.replay.analyses.roofline.limits import BOUNDS, LimitColumns
from opgrip.replay.results.results import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


NAMED = 9
"""Operators that the key has."""
COLORS = dict(zip(BOUNDS, PALETTE, strict=False))
INK: dict[str, Any] = {"color": "#222222", "linewidth": 1.0, "zorder": 1}
DASHES = ("-", "--", "-.", ":")
"""Of the levels of memory, from the nearest."""
PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def line_of_level(place: int) -> dict[str, Any]:
    """How the line of a level of memory is drawn."""
    return {**INK, "linestyle": DASHES[place % len(DASHES)]}


def add_legend(figure: Figure, heading: str, bandwidths: Mapping[str, float]) -> None:
    """The heading above all, with the colours of what binds, and the lines of levels, by name in GB/s."""
    line = needed("matplotlib.lines", "plot").Line2D
    nothing = (line([], [], linestyle=""), "")
    bounds = [(line([], [], linestyle="", marker="o", color=color, alpha=0.6), name) for name, color in COLORS.items()]
    levels = [
        (line([], [], **line_of_level(place)), f"{name} {short(rate * 1e9, 'B/s')}")
        for place, (name, rate) in enumerate(bandwidths.items())
    ]
    # a legend is filled column by column
    entries = [entry for column in zip_longest(bounds, levels, fillvalue=nothing) for entry in column]
    title = f"{heading}\na dot's area is its share of the time, its colour what binds it"
    handles, names = zip(*entries, strict=True)
    figure.legend(handles, names, loc="outside upper center", ncols=len(entries) // 2, title=title)


def add_key(figure: Figure, rows: Sequence[Result], total: float) -> dict[str, int]:
    """Name the operators with most time below all; the numbers that they have there."""
    times = Counter[str]()
    for row in rows:
        times[row.op] += row.count * (row.median_us or 0.0)  # type: ignore[assignment]
    largest = times.most_common(NAMED)
    if largest:
        names = [f"{number}  {literal(op, 44)} {time / total:.1%}" for number, (op, time) in enumerate(largest, 1)]
        handles = [needed("matplotlib.lines", "plot").Line2D([], [], linestyle="") for _ in largest]
        figure.legend(handles, names, loc="outside lower center", ncols=3, handlelength=0, handletextpad=0)
    return {op: number for number, (op, _) in enumerate(largest, 1)}


def short(value: float, unit: str) -> str:
    """A number in three digits with the prefix of its unit."""
    size, prefix = next((pair for pair in PREFIXES if value >= pair[0]), (1.0, ""))
    return f"{value / size:.3g} {prefix}{unit}"


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
