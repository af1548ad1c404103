"""Bar charts of the time in a trace, with one bar per operator or module, divided by phase or another column."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd

from opgrip.display.figures import PALETTE, add_legend, label_axis, literal, new_figure
from opgrip.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# columns of a trace's calls that can be shown as bars and as their parts
COLUMNS = ("op", "module", "phase", "function", "kind", "device", "thread")
MOST_BARS = 20
LEAST_SHARE = 0.001  # smallest share of the total time for which a bar is shown
MOST_PARTS = 6  # maximum number of named parts; the other parts are added up
REST = "others"
DEEPEST = 4  # maximum depth of module paths in the names of parts


def check_columns(*names: str) -> None:
    strange = [name for name in names if name not in COLUMNS]
    if strange:
        raise UserError(f"a picture cannot be grouped by {strange[0]}", f"choose {', '.join(COLUMNS)}")


def draw_times(table: pd.DataFrame, by: str, parts: str, title: str) -> Figure:
    """Return a bar chart of the result of `Trace.summary(by, parts)`; bars show numbers of calls if no call has a
    time.
    """
    if table.empty:
        raise UserError("the trace has no calls", "capture a step that runs some")
    measure = "time_us" if table["time_us"].any() else "calls"
    names = _parts(table[parts].astype(object), parts)
    bars = _texts(table[by].astype(object), by)
    sums = table[measure].groupby([bars.rename("bar"), names.rename("part")]).sum().unstack(fill_value=0)
    total = float(sums.to_numpy().sum()) or 1.0
    sums = sums.loc[sums.sum(axis="columns").sort_values(ascending=False, kind="stable").index]
    sums = sums[sums.sum().sort_values(ascending=False, kind="stable").index]
    shown = sums[sums.sum(axis="columns") >= LEAST_SHARE * total].iloc[:MOST_BARS]
    rest = len(sums) - len(shown)
    figure, (axes,) = new_figure(title, size=(6.6, 1.4 + 0.22 * len(shown)))
    ends = pd.Series(0.0, index=shown.index)
    for place, (name, color) in enumerate(
        zip(_largest_parts(shown).columns, (*PALETTE[:MOST_PARTS], "#999999"), strict=False)
    ):
        widths = _largest_parts(shown).iloc[:, place]
        axes.barh(range(len(shown)), widths, 0.8, ends, color=color, label=literal(name, 28))
        ends = ends + widths
    for height, width in enumerate(ends):
        axes.annotate(
            f"{width / total:.1%}", (width, height), (3, 0), textcoords="offset points", va="center", fontsize=7
        )
    axes.set_yticks(range(len(shown)), [literal(name, 40) for name in shown.index])
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.margins(x=0.1)
    axes.grid(axis="y", visible=False)
    if measure == "time_us":
        label_axis(axes.xaxis, "time of all calls", "s", 1e-6)
    else:
        label_axis(axes.xaxis, "calls")
    if rest:
        axes.set_ylabel(f"{rest:,} shorter ones are left out")
    add_legend(figure, axes)
    return figure


def _texts(values: pd.Series[Any], column: str) -> pd.Series[str]:
    absent = "(outside)" if column in ("module", "function") else "-"
    texts = [absent if pd.isna(value) or value == "" else str(value) for value in values]
    return pd.Series(texts, values.index)


def _parts(values: pd.Series[Any], column: str) -> pd.Series[str]:
    # module paths are cut to the smallest depth at which there are more than two different names
    texts = _texts(values, column)
    if column != "module":
        return texts
    for depth in range(1, DEEPEST + 1):
        heads = pd.Series([".".join(text.split(".")[:depth]) for text in texts], texts.index)
        if heads.nunique() > 2:
            return heads
    return heads


def _largest_parts(sums: pd.DataFrame) -> pd.DataFrame:
    if sums.shape[1] <= MOST_PARTS + 1:
        return sums
    few = sums.iloc[:, :MOST_PARTS].copy()
    few[REST] = sums.iloc[:, MOST_PARTS:].sum(axis="columns")
    return few
