"""Draw docs/timeline.svg: the last prediction of a shipped trace, from the events of `opgrip trace timeline`.

python docs/timeline.py          # writes docs/timeline.svg, or the file given as argument
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opgrip.display.figures import PALETTE, label_axis, literal, new_figure, write_figure
from opgrip.replay.operators.lookup import family_of
from opgrip.traces import load
from opgrip.traces.analysis.timeline import CALL, MODULE, timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PICTURE = Path(__file__).with_name("timeline.svg")
FIRST_MODULE = "data_preprocessor"
"""module that starts each prediction"""
DEPTH = 3
"""number of module levels that have a row"""
LEAST_US = 300.0
"""minimum duration of a visible call"""
OTHERS = "other families"
ROW = 0.84
"""height of a bar in its row"""

Event = dict[str, Any]


def main() -> None:
    """Write the picture."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURE
    trace = load("trace:faster_rcnn")
    events = [event for event in timeline(trace) if event["ph"] == "X"]
    start = max(event["ts"] for event in events if event["name"] == FIRST_MODULE)
    last = [event for event in events if event["ts"] >= start and event["dur"] >= LEAST_US]
    with path.open("wb") as file:
        write_figure(lambda: draw(last, start), "svg", file)


def draw(events: list[Event], start: float) -> Figure:
    """Return a figure with one row per module level and one of operators, coloured by family."""
    figure, (axes,) = new_figure("Faster R-CNN, one prediction: modules and operators", size=(9.6, 3.0))
    colors = _colors(events)
    labels = []
    for event in events:
        level = event["name"].count(".") if event["cat"] == MODULE else DEPTH
        if event["cat"] not in (MODULE, CALL) or (event["cat"] == MODULE and level >= DEPTH):
            continue
        color = "#dddddd" if event["cat"] == MODULE else colors.get(family_of(event["name"]), colors[OTHERS])
        begin = event["ts"] - start
        axes.barh(level, event["dur"], ROW, begin, color=color, edgecolor="white", linewidth=0.4)
        if event["cat"] == MODULE:
            labels.append((begin, event["dur"], level, event["name"].rpartition(".")[2]))
    axes.set_yticks(range(DEPTH + 1), ["modules", "modules in them", "and in those", "operators"])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.margins(x=0.01)
    label_axis(axes.xaxis, "time since the prediction began", "s", 1e-6)
    for name, color in colors.items():
        axes.barh(0, 0, color=color, label=name)
    figure.legend(loc="outside lower center", ncols=len(colors))
    figure.draw_without_rendering()
    for label in labels:
        _write_where_it_fits(axes, *label)
    return figure


def _colors(events: list[Event]) -> dict[str, str]:
    """Return the colours of the families with most time, and one colour for all others."""
    times = Counter[str]()
    for event in events:
        if event["cat"] == CALL:
            times[family_of(event["name"])] += event["dur"]
    names = [name for name, _ in times.most_common(len(PALETTE) - 2)]
    return {**dict(zip(names, PALETTE, strict=False)), OTHERS: "#999999"}


def _write_where_it_fits(axes: Axes, begin: float, duration: float, level: int, name: str) -> None:
    text = axes.text(begin + duration / 2, level, literal(name), ha="center", va="center", fontsize=7)
    left, right = axes.transData.transform([(begin, level), (begin + duration, level)])[:, 0]
    if text.get_window_extent().width > (right - left) * 0.94:
        text.remove()


if __name__ == "__main__":
    main()
