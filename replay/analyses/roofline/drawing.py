"""The drawing of a roofline: dots for cases, lines for the machine's peaks, numbers and legends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from math import hypot, log, sqrt
from typing import TYPE_CHECKING, Any

from opgrip.cli.command import counted
from opgrip.cli.plugins import needed
from opgrip.display.figures import PALETTE, label_axis, literal, logarithmic, new_figure
from opgrip.platform.peaks import TF32, Peaks
from opgrip.replay.analyses.roofline import BOUNDS, LimitColumns, time_of
from opgrip.replay.results.results import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAMED = 9  # number of operators in the list below the plots
COLORS = dict(zip(BOUNDS, PALETTE, strict=False))
INK: dict[str, Any] = {"color": "#222222", "linewidth": 1.0, "zorder": 1}
DASHES = ("-", "--", "-.", ":")  # line styles of memory levels, from the level nearest to the processor
PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def line_of_level(index: int) -> dict[str, Any]:
    return {**INK, "linestyle": DASHES[index % len(DASHES)]}


def add_legend(figure: Figure, heading: str, bandwidths: Mapping[str, float]) -> None:
    line = needed("matplotlib.lines", "plot").Line2D
    nothing = (line([], [], linestyle=""), "")
    bounds = [(line([], [], linestyle="", marker="o", color=color, alpha=0.6), name) for name, color in COLORS.items()]
    levels = [
        (line([], [], **line_of_level(index)), f"{name} {short(rate * 1e9, 'B/s')}")
        for index, (name, rate) in enumerate(bandwidths.items())
    ]
    # matplotlib fills a legend column by column
    entries = [entry for column in zip_longest(bounds, levels, fillvalue=nothing) for entry in column]
    title = f"{heading}\na dot's area is its share of the time, its colour shows what limits it"
    handles, names = zip(*entries, strict=True)
    figure.legend(handles, names, loc="outside upper center", ncols=len(entries) // 2, title=title)


def add_key(figure: Figure, rows: Sequence[Result], total: float) -> dict[str, int]:
    times = Counter[str]()
    for row in rows:
        times[row.op] += time_of(row)  # type: ignore[assignment]
    largest = times.most_common(NAMED)
    if largest:
        names = [f"{number}  {literal(op, 44)} {time / total:.1%}" for number, (op, time) in enumerate(largest, 1)]
        handles = [needed("matplotlib.lines", "plot").Line2D([], [], linestyle="") for _ in largest]
        figure.legend(handles, names, loc="outside lower center", ncols=3, handlelength=0, handletextpad=0)
    return {op: number for number, (op, _) in enumerate(largest, 1)}


def short(value: float, unit: str) -> str:
    """Return a number and its unit, such as `1.23 GB/s`."""
    size, prefix = next((pair for pair in PREFIXES if value >= pair[0]), (1.0, ""))
    return f"{value / size:.3g} {prefix}{unit}"


SMALLEST, LARGEST = 9.0, 1200.0  # areas in square points of the dots for a share of time of almost 0, and of 1
APART = 9.0  # minimum distance between the centres of two numbers, in points

STYLE: dict[str, Any] = {"alpha": 0.6, "linewidths": 0.5, "edgecolors": "white", "in_layout": False, "zorder": 3}

Dot = tuple[float, float, Result]


def add_dots(axes: Axes, dots: Sequence[Dot], total: float) -> None:
    for index, (x, y, row) in enumerate(_ordered(dots)):
        area = SMALLEST + time_of(row) / total * (LARGEST - SMALLEST)
        color = COLORS.get(LimitColumns.of(row).bound or "", "#888888")
        axes.scatter([x], [y], area, color=color, gid=f"dot {index}", **STYLE)


def add_numbers(axes: Axes, dots: Sequence[Dot], key: Mapping[str, int]) -> None:
    positions: list[tuple[float, float]] = []
    numbered: set[str] = set()
    for x, y, row in _ordered(dots):
        if row.op in key and row.op not in numbered:
            numbered.add(row.op)
            _add_number(axes, x, y, key[row.op], positions)


def _ordered(dots: Sequence[Dot]) -> list[Dot]:
    return sorted(dots, key=lambda dot: -time_of(dot[2]))


def _add_number(axes: Axes, x: float, y: float, number: int, positions: list[tuple[float, float]]) -> None:
    point = axes.transData.transform((x, y)) * 72 / axes.figure.dpi
    steps = [(0, 0), *((radius * a, radius * b) for radius in (1, 2, 3) for a, b in _AROUND)]
    for across, up in steps:
        position = point[0] + across * APART, point[1] + up * APART
        if all(hypot(position[0] - other[0], position[1] - other[1]) >= APART for other in positions):
            break
    positions.append(position)
    offset = across * APART, up * APART
    line = {"arrowstyle": "-", "linewidth": 0.5} if (across, up) != (0, 0) else None
    axes.annotate(str(number), (x, y), offset, textcoords="offset points", ha="center", va="center", fontsize=7,
                  fontweight="bold", zorder=4, arrowprops=line)  # fmt: skip


_AROUND = ((1, 1), (-1, 1), (1, -1), (-1, -1), (0, 1.2), (1.2, 0), (0, -1.2), (-1.2, 0))


SIZE = (8.6, 5.4)
LANE = 0.1  # position of calls that move no bytes, relative to the smallest number of bytes of other calls
FEWEST_BYTES, MOST_BYTES = 1e3, 1e6  # minimum range of the axis of bytes
LABELS_APART = 0.07  # minimum distance between two labels, relative to the height of the axes
LEAST_US, MOST_US = 1.0, 100.0  # minimum range of the axis of times, in us


def draw(rows: Sequence[Result], ceilings: Peaks, threads: int, title: str) -> Figure:
    """Return a figure: a roofline of rows with arithmetic, and a plot of the other rows' times over their bytes."""
    shown = [row for row in rows if LimitColumns.of(row).bound is not None and row.median_us]
    computing = [row for row in shown if row.flops and row.bytes_moved]
    others = [row for row in shown if not (row.flops and row.bytes_moved)]
    total = sum(map(time_of, shown)) or 1.0
    figure, (left, right) = new_figure("", 1, 2, size=SIZE)
    _draw_roofline(left, computing, ceilings, threads)
    _draw_times(right, others, ceilings, threads)
    heading = f"{literal(title, 60)}: {literal(' '.join(ceilings.machine), 50)}, {counted(threads, 'thread')}"
    add_legend(figure, heading, {level.name: ceilings.bandwidth(level, threads) for level in ceilings.levels})
    key = add_key(figure, shown, total)
    dots_by_axes = {
        left: [(*_point(row), row) for row in computing],
        right: [(float(row.bytes_moved or _lane(others)), row.median_us or 1.0, row) for row in others],
    }
    for axes, dots in dots_by_axes.items():
        add_dots(axes, dots, total)
    # distances between numbers are known only after a first layout
    figure.draw_without_rendering()
    for axes, dots in dots_by_axes.items():
        add_numbers(axes, dots, key)
    return figure


def _draw_roofline(axes: Axes, rows: Sequence[Result], ceilings: Peaks, threads: int) -> None:
    points = [_point(row) for row in rows]
    rates = _rates(rows, ceilings, threads)
    top = max(rates.values(), default=1.0)
    bandwidths = {level.name: ceilings.bandwidth(level, threads) for level in ceilings.levels}
    logarithmic(axes, "x", [*(point[0] for point in points), 0.1, 100.0])
    logarithmic(axes, "y", [*(point[1] for point in points), top * 1.5, top / 1000])
    label_axis(axes.xaxis, "flop/byte")
    axes.xaxis.set_major_formatter("{x:g}")
    label_axis(axes.yaxis, "operations a second", "flop/s", 1e9)
    (x_low, x_high), (y_low, y_high) = axes.get_xlim(), axes.get_ylim()
    for index, (name, rate) in enumerate(bandwidths.items()):
        first = max(x_low, y_low / rate)
        axes.plot([first, top / rate], [first * rate, top], gid=f"bandwidth {name}", **line_of_level(index))
    height = 1.0
    for dtype, rate in rates.items():
        knee = max(rate / max(bandwidths.values()), x_low)
        axes.plot([knee, x_high], [rate, rate], gid=f"rate {dtype}", **INK)
        height = min(height - LABELS_APART, log(rate / y_low) / log(y_high / y_low))
        # outside the axes, because dots lie along the line
        axes.text(
            1.01, height, f"{dtype}\n{short(rate * 1e9, 'flop/s')}", transform=axes.transAxes, va="center", fontsize=7
        )


def _rates(rows: Sequence[Result], ceilings: Peaks, threads: int) -> dict[str, float]:
    dtypes = {row.math_dtype for row in rows} & ceilings.rates.keys() or {"float32"} & ceilings.rates.keys()
    if "float32" in dtypes:
        dtypes |= {TF32} & ceilings.rates.keys()
    rates = {dtype: ceilings.rate(dtype, threads) or 1.0 for dtype in map(str, dtypes)}
    return dict(sorted(rates.items(), key=lambda item: (-item[1], item[0])))


def _draw_times(axes: Axes, rows: Sequence[Result], ceilings: Peaks, threads: int) -> None:
    sizes = [float(row.bytes_moved) for row in rows if row.bytes_moved]
    has_lane = any(not row.bytes_moved for row in rows)
    lane = _lane(rows)
    logarithmic(axes, "x", [*sizes, *([lane] if has_lane else []), FEWEST_BYTES, MOST_BYTES])
    times = [row.median_us or 1.0 for row in rows]
    logarithmic(axes, "y", [*times, ceilings.dispatch_us, ceilings.launch_us, LEAST_US, MOST_US])
    (x_low, x_high), (y_low, y_high) = axes.get_xlim(), axes.get_ylim()
    edge = lane / sqrt(LANE) if has_lane else x_low
    label_axis(axes.xaxis, "bytes moved, of calls without arithmetic", "B", least=edge)
    label_axis(axes.yaxis, "time", "s", 1e-6)
    if has_lane:
        axes.axvline(edge, **{**INK, "color": "#999999"})
        axes.text(lane, 1.0, "none", transform=axes.get_xaxis_transform(), ha="center", va="bottom", fontsize=7)
        axes.plot([x_low, edge], [ceilings.dispatch_us] * 2, gid="dispatch", **INK)
    axes.plot([edge, x_high], [ceilings.launch_us] * 2, gid="launch", **INK)
    label: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "va": "center", "fontsize": 7}
    axes.text(1.01, ceilings.launch_us, "one\nlaunch", **label)
    for index, level in enumerate(ceilings.levels):
        rate = ceilings.bandwidth(level, threads) * 1e3
        first, last = max(edge, y_low * rate), min(x_high, y_high * rate)
        if first < last:
            axes.plot([first, last], [first / rate, last / rate], gid=f"time {level.name}", **line_of_level(index))


def _lane(rows: Sequence[Result]) -> float:
    return LANE * min([FEWEST_BYTES, *(float(row.bytes_moved) for row in rows if row.bytes_moved)])


def _point(row: Result) -> tuple[float, float]:
    flops = row.flops or 0
    return flops / (row.bytes_moved or 1), flops / (row.median_us or 1.0) / 1e3
