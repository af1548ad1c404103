"""What the colours, lines and numbers of a roofline mean, outside of its axes, where no dot lies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from opgrip.cli.extras import needed
from opgrip.display.figures import PALETTE, literal
from opgrip.replay.analyses.roofline.limits import BOUNDS
from opgrip.replay.results.results import Result

if TYPE_CHECKING:
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
