"""Draws the roofline: the machine's ceilings on logarithmic axes, and a dot for each case."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import sqrt
from xml.sax.saxutils import escape

from opgrip.replay.analyses.roofline.axes import Axis, axis_over, element, short, words
from opgrip.replay.analyses.roofline.limits import BOUNDS, LimitColumns
from opgrip.replay.measuring.results import Result
from opgrip.traces.ceilings.ceilings import TF32, Ceilings

WIDTH, HEIGHT = 1100, 560
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 66, 60
SPLIT = 640
"""Between the roofline and the times of what has no arithmetic."""
LANE = 40
"""Width of the lane of what moves no bytes."""
SMALLEST, LARGEST = 2.0, 26.0
"""Radius of the dot of a case that takes next to no time, and of one that takes all of it."""
STYLE = """
svg{--ink:#222;--faint:#ddd;--paper:#fff;--bandwidth:#0072b2;--arithmetic:#d55e00;--launch:#009e73;--interpreter:#a64d86}
@media(prefers-color-scheme:dark){svg{--ink:#ddd;--faint:#3a3a3a;--paper:#151515;--bandwidth:#56b4e9;
--arithmetic:#f0894a;--launch:#3fc79a;--interpreter:#e29cc8}}
text{font:11px system-ui,sans-serif;fill:var(--ink)}.title{font-size:14px}.grid{stroke:var(--faint)}
.roof{stroke:var(--ink);fill:none;stroke-width:1.2}.paper{fill:var(--paper)}circle{fill-opacity:.55;stroke-width:.7}
""" + "".join(f".{bound}{{fill:var(--{bound});stroke:var(--{bound})}}" for bound in BOUNDS)


def draw(rows: Sequence[Result], ceilings: Ceilings, threads: int, title: str) -> str:
    """The drawing as the text of an SVG file; light or dark as its reader's screen is.

    Left, operations a second over operations a byte. Right, for calls that compute nothing or for which there is no
    formula, the time over the bytes. The area of a dot is its case's share of the time.

    Parameters
    ----------
    rows : those without a limit are left out
    threads : whose ceilings are drawn
    """
    shown = [row for row in rows if LimitColumns.of(row).bound is not None and row.median_us]
    computing = [row for row in shown if row.flops and row.bytes_moved]
    others = [row for row in shown if not (row.flops and row.bytes_moved)]
    total = sum(row.count * (row.median_us or 0.0) for row in shown) or 1.0
    content = [
        element("style", STYLE),
        element("rect", width=WIDTH, height=HEIGHT, class_="paper"),
        words(title, LEFT, 22, class_="title"),
        words(f"{ceilings.machine[0]} {' '.join(ceilings.machine[1:])}, {threads} threads", LEFT, 40),
        *_legend(),
        *_roofline(computing, ceilings, threads, total),
        *_times(others, ceilings, threads, total),
    ]
    size = f"0 0 {WIDTH} {HEIGHT}"
    svg = element("svg", "\n".join(content), xmlns="http://www.w3.org/2000/svg", viewBox=size, width=WIDTH)
    return f"{svg}\n"


def _roofline(rows: Sequence[Result], ceilings: Ceilings, threads: int, total: float) -> Iterator[str]:
    """Gflop/s over flop/byte."""
    points = [_point(row) for row in rows]
    dtypes = {row.math_dtype for row in rows} & ceilings.rates.keys() or {"float32"} & ceilings.rates.keys()
    if "float32" in dtypes:
        dtypes |= {TF32} & ceilings.rates.keys()
    rates = {dtype: ceilings.rate(dtype, threads) or 1.0 for dtype in sorted(map(str, dtypes))}
    top = max(rates.values(), default=1.0)
    x = axis_over([*(point[0] for point in points), 0.1, 100.0], LEFT, SPLIT - 60)
    y = axis_over([*(point[1] for point in points), top, top / 100], HEIGHT - BOTTOM, TOP)
    yield from _grid(x, y, "operations a byte", "operations a second", "flop/B", "flop/s", 1e9)
    for level in ceilings.levels:
        rate = ceilings.bandwidth(level, threads)
        yield _slope(x, y, rate, top)
        start = max(x.low, y.low / rate)
        label = f"{level.name} {short(rate * 1e9, 'B/s')}"
        yield words(label, x.place(start) + 4, y.place(start * rate) - 4, font_size=10)
    for dtype, rate in rates.items():
        knee = rate / max(ceilings.bandwidth(level, threads) for level in ceilings.levels)
        yield _line(x.place(max(knee, x.low)), y.place(rate), x.end, y.place(rate))
        yield words(f"{dtype} {short(rate * 1e9, 'flop/s')}", x.end, y.place(rate) - 4, text_anchor="end", font_size=10)
    yield from _dots([(x.place(a), y.place(b), row) for (a, b), row in zip(points, rows, strict=True)], total)


def _times(rows: Sequence[Result], ceilings: Ceilings, threads: int, total: float) -> Iterator[str]:
    """Time over bytes; what moves none has a lane to the left."""
    sizes = [float(row.bytes_moved) for row in rows if row.bytes_moved]
    x = axis_over([*sizes, 1e3, 1e6], SPLIT + LANE, WIDTH - RIGHT)
    y = axis_over([*(row.median_us or 1.0 for row in rows), ceilings.dispatch_us, 100.0], HEIGHT - BOTTOM, TOP)
    yield from _grid(x, y, "bytes moved, of calls without arithmetic", "time", "B", "s", 1e-6)
    yield words("none", SPLIT + LANE / 2, HEIGHT - BOTTOM + 16, text_anchor="middle")
    yield _line(SPLIT, y.place(ceilings.dispatch_us), SPLIT + LANE, y.place(ceilings.dispatch_us))
    yield _line(x.start, y.place(ceilings.launch_us), x.end, y.place(ceilings.launch_us))
    for level in ceilings.levels:
        rate = ceilings.bandwidth(level, threads) * 1e3
        first, last = max(x.low, y.low * rate), min(x.high, y.high * rate)
        if first < last:
            yield _line(x.place(first), y.place(first / rate), x.place(last), y.place(last / rate))
            yield words(level.name, x.place(last) - 4, y.place(last / rate) + 12, text_anchor="end", font_size=10)
    dots = [
        (x.place(row.bytes_moved) if row.bytes_moved else SPLIT + LANE / 2, y.place(row.median_us or 1.0), row)
        for row in rows
    ]
    yield from _dots(dots, total)


def _dots(dots: Sequence[tuple[float, float, Result]], total: float) -> Iterator[str]:
    """The large ones first, so that none hides a smaller one."""
    for x, y, row in sorted(dots, key=lambda dot: -dot[2].count * (dot[2].median_us or 0.0)):
        share = row.count * (row.median_us or 0.0) / total
        radius = sqrt(SMALLEST**2 + share * (LARGEST**2 - SMALLEST**2))
        own = LimitColumns.of(row)
        near = f"{share:.1%} of the time, {own.of_limit or 0:.2f} of its limit by {own.bound}"
        tooltip = f"{row.op} {row.shapes[:60]}: {near}"
        yield element("circle", element("title", escape(tooltip)), cx=x, cy=y, r=radius, class_=own.bound)


def _point(row: Result) -> tuple[float, float]:
    """Operations a byte, and Gflop/s."""
    flops = row.flops or 0
    return flops / (row.bytes_moved or 1), flops / (row.median_us or 1.0) / 1e3


def _grid(x: Axis, y: Axis, along: str, up: str, x_unit: str, y_unit: str, y_scale: float) -> Iterator[str]:
    for value in x.decades():
        yield _line(x.place(value), y.start, x.place(value), y.end, "grid")
        yield words(short(value, x_unit), x.place(value), y.start + 16, text_anchor="middle", font_size=10)
    for value in y.decades():
        yield _line(x.start, y.place(value), x.end, y.place(value), "grid")
        yield words(short(value * y_scale, y_unit), x.start - 4, y.place(value) + 4, text_anchor="end", font_size=10)
    yield words(along, (x.start + x.end) / 2, y.start + 38, text_anchor="middle")
    yield words(up, x.start, y.end - 8)


def _slope(x: Axis, y: Axis, rate: float, top: float) -> str:
    """The line of a bandwidth up to the highest ceiling."""
    first, last = max(x.low, y.low / rate), min(x.high, top / rate)
    return _line(x.place(first), y.place(first * rate), x.place(last), y.place(last * rate))


def _line(x1: float, y1: float, x2: float, y2: float, kind: str = "roof") -> str:
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=kind)


def _legend() -> Iterator[str]:
    place = float(WIDTH - RIGHT - 420)
    for bound in BOUNDS:
        yield element("rect", x=place, y=12, width=11, height=11, class_=bound)
        yield words(f"by {bound}", place + 16, 22)
        place += 105
    yield words("a dot's area is its share of the time", WIDTH - RIGHT - 420, 40)
