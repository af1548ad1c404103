"""Matplotlib plots in one style, with identical files for identical data, and HTML for notebooks."""

from __future__ import annotations

import base64
import io
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from html import escape
from math import inf, log10
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from opgrip.cli.command import printable
from opgrip.cli.plugins import needed
from opgrip.errors import UserError

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure


# colours that colour-blind readers can distinguish: M. Okabe and K. Ito, Color Universal Design, 2008
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
MARKERS = "osD^vPX"  # markers that distinguish series in prints without colour
# metadata by file type; the time is left out so that identical data gives identical files
METADATA: dict[str, dict[str, Any]] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}
# pairs of a length in decades and multiples of powers of ten; axes shorter than the length are labelled at these
# multiples
LABELS = ((1.2, (1.0, 2.0, 5.0)), (2.5, (1.0, 3.0)))
# resolution of an image, and of the page that shows it; a higher resolution looks sharp on screens
DOTS_PER_INCH, PIXELS_PER_INCH = 150, 100


def check_plottable(path: Path) -> None:
    """Raise `UserError` if matplotlib is not installed or cannot write files with the path's suffix."""
    if path.suffix.removeprefix(".") not in METADATA:
        names = ", ".join(f".{kind}" for kind in METADATA)
        raise UserError(
            f"{path} does not end in the suffix of an image format", f"choose a name that ends in one of {names}"
        )
    needed("matplotlib", "plot")


def write_figure(draw: Callable[[], Figure], kind: str, file: IO[bytes]) -> None:
    with in_style():
        draw().savefig(file, format=kind, metadata=METADATA[kind])


def new_figure(title: str, rows: int = 1, columns: int = 1, **options: Any) -> tuple[Figure, list[Axes]]:
    """Return a figure with `rows` times `columns` plots, and the axes of the plots, row by row.

    options : arguments of `matplotlib.figure.Figure.subplots`, and `size`, the (width, height) of the figure in inches
    """
    size = options.pop("size", (6.6, 3.6))
    needed("matplotlib", "plot")
    figure = _styled_figure()(figsize=size, layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, **options)
    if title:
        figure.suptitle(literal(title, 110), fontsize=9)
    return figure, list(grid.flat)


@cache
def _styled_figure() -> type[Figure]:
    from matplotlib.figure import Figure

    class StyledFigure(Figure):
        # drawn in opgrip's plot style wherever a program shows or saves it; Jupyter shows it as an image

        def savefig(self, *args: Any, **options: Any) -> None:
            with in_style():
                super().savefig(*args, **options)

        def _repr_mimebundle_(self, **_: Any) -> tuple[dict[str, str], dict[str, dict[str, int]]]:
            png, width = _png_of(self)
            return {"image/png": png, "text/plain": repr(self)}, {"image/png": {"width": width}}

    return StyledFigure


def _png_of(figure: Figure) -> tuple[str, int]:
    # in base64, with the width in page pixels at which a notebook shows the image
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=DOTS_PER_INCH, pil_kwargs={"optimize": True})
    return base64.b64encode(file.getvalue()).decode(), round(figure.get_size_inches()[0] * PIXELS_PER_INCH)


def literal(text: object, most: int = 60) -> str:
    shown = printable(text)
    return shown if len(shown) <= most else f"{shown[: most - 1]}…"


def label_axis(axis: Axis, name: str, unit: str = "", scale: float = 1.0, least: float = -inf) -> None:
    """Set the label of an axis, and print its numbers with SI prefixes and a unit, such as `20 us`.

    unit : the unit without prefix, such as `s`
    scale : factor that converts the plotted values to `unit`, such as 1e-6 for values in us and the unit s
    least : smallest plotted value that gets a number on the axis
    """
    ticker = needed("matplotlib.ticker", "plot")
    prefixes = ticker.EngFormatter(unit)
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: prefixes(value * scale) if value >= least else ""))
    axis.set_minor_formatter(ticker.NullFormatter())
    axis.set_label_text(name)


def logarithmic(axes: Axes, which: str, values: Sequence[float]) -> None:
    """Give the axis `x` or `y` a logarithmic scale and a range that contains all values, which must be above 0."""
    ticker = needed("matplotlib.ticker", "plot")
    low, high = min(values), max(values)
    decades = log10(high / low)
    margin = 10 ** max(0.06 * decades, 0.06)
    axis = axes.xaxis if which == "x" else axes.yaxis
    axes.set(**{f"{which}scale": "log", f"{which}lim": (low / margin, high * margin)})
    multiples = next((parts for most, parts in LABELS if decades < most), (1.0,))
    axis.set_major_locator(ticker.LogLocator(subs=multiples, numticks=8))
    axis.set_minor_locator(ticker.LogLocator(subs="auto", numticks=8))


def marked(place: int) -> dict[str, Any]:
    return {"color": PALETTE[place % len(PALETTE)], "marker": MARKERS[place % len(MARKERS)]}


def add_legend(figure: Figure, axes: Axes, columns: int = 3) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=columns)


STYLE = {
    "font.family": ["DejaVu Sans", "sans-serif"],
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.2,
    "lines.markersize": 4,
    "legend.frameon": False,
    "savefig.dpi": 200,
    "svg.fonttype": "none",
    "svg.hashsalt": "opgrip",
    "pdf.fonttype": 42,
    "text.parse_math": False,
    "text.usetex": False,
}


@contextmanager
def in_style() -> Iterator[None]:
    matplotlib = needed("matplotlib", "plot")
    # a user's matplotlibrc would change the pictures
    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


MOST_ROWS = 40  # maximum number of rows shown of a table; longer tables show their first and last rows
PLAIN_TEXT = "tex2jax_ignore mathjax_ignore"  # element classes whose text notebooks do not parse as mathematics


def as_html(lines: Sequence[str], table: pd.DataFrame, draw: Callable[[], Figure] | None = None) -> str:
    """Return an HTML fragment with lines of text, a figure if one can be drawn, and a table."""
    shown = table.copy()
    for name in table.select_dtypes(exclude="number"):
        shown[name] = [printable(cell) if isinstance(cell, str) else cell for cell in table[name]]
    forms = {"share": lambda share: f"{share:.1%}"} if "share" in shown else {}
    number = lambda value: f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"  # noqa: E731
    cells = shown.to_html(
        index=False, max_rows=MOST_ROWS, float_format=number, formatters=forms, na_rep="", border=0, justify="left"
    )
    image = "" if draw is None else _image(draw, lines[0])
    paragraphs = "".join(f"<p>{escape(printable(line))}</p>" for line in lines)
    return f'<div class="{PLAIN_TEXT}">{paragraphs}{image}{cells}</div>'


def _image(draw: Callable[[], Figure], description: str) -> str:
    try:
        with in_style():
            png, width = _png_of(draw())
    except UserError:
        return ""
    alternative = escape(printable(description))
    return f'<p><img width="{width}" alt="{alternative}" src="data:image/png;base64,{png}"></p>'
