"""What notebooks show: lines, a picture and a table, in HTML that takes every name of a stranger's as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import TYPE_CHECKING

import pandas as pd

from opgrip.cli.command import printable
from opgrip.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_ROWS = 40
"""That a table shows; of more, the first and the last of them."""
PLAIN_TEXT = "tex2jax_ignore mathjax_ignore"
"""Classes of elements in which notebooks take no text for mathematics."""


def as_html(lines: Sequence[str], table: pd.DataFrame, draw: Callable[[], Figure] | None = None) -> str:
    """Lines, a picture where matplotlib is installed and there is something to be drawn, and a table.

    Parameters
    ----------
    draw : makes the figure, in the style that is set meanwhile
    """
    shown = table.copy()
    for name in table.select_dtypes(exclude="number"):
        shown[name] = [printable(cell) if isinstance(cell, str) else cell for cell in table[name]]
    forms = {"share": lambda share: f"{share:.1%}"} if "share" in shown else {}
    cells = shown.to_html(
        index=False, max_rows=MOST_ROWS, float_format=_number, formatters=forms, na_rep="", border=0, justify="left"
    )
    image = "" if draw is None else _image(draw, lines[0])
    paragraphs = "".join(f"<p>{escape(printable(line))}</p>" for line in lines)
    return f'<div class="{PLAIN_TEXT}">{paragraphs}{image}{cells}</div>'


def _number(value: float) -> str:
    """Four digits, without powers of ten."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _image(draw: Callable[[], Figure], description: str) -> str:
    from opgrip.display.figure_style import in_style

    try:
        with in_style():
            figure = draw()
            from opgrip.display.styled_figure import png_of

            png, width = png_of(figure)
    except UserError:
        return ""
    alternative = escape(printable(description))
    return f'<p><img width="{width}" alt="{alternative}" src="data:image/png;base64,{png}"></p>'
