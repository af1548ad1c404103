"""The one style of all pictures: text of traces and results is never read as mathematics, and stays text."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from opgrip.cli.plugins import needed

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
    """What is drawn in this block has the style of all pictures, whatever that of the program is."""
    matplotlib = needed("matplotlib", "plot")
    # a user's own matplotlibrc would make other pictures of the same data
    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield
