"""A comparison as a data frame, and as a notebook shows it."""

from __future__ import annotations

from dataclasses import asdict

import pandas as pd

from opgrip.display.html_fragments import as_html
from opgrip.replay.compare.comparison import Comparison
from opgrip.replay.compare.reports.rows import ComparisonColumns, rows_of
from opgrip.replay.compare.reports.words import advice, origin, summary, total_line
from opgrip.replay.results.columns import columns_in

SHOWN = (
    "verdict",
    "op",
    "shapes",
    "mode",
    "variant",
    "count",
    "base_us",
    "new_us",
    "ratio",
    "low",
    "high",
    "more_runs",
    "reason",
)
"""Columns that a notebook shows, as far as a row has something in them."""


def to_frame(comparison: Comparison) -> pd.DataFrame:
    """One row a case and mode, those that got worse first."""
    names = [about.name for about in columns_in(ComparisonColumns)]
    return pd.DataFrame([asdict(row) for row in rows_of(comparison)], columns=names)


def to_html(comparison: Comparison) -> str:
    """What came of all cases, what the runs were made with that is not the same, and the rows."""
    lines = [
        summary(comparison),
        *(total_line(total) for total in comparison.totals()),
        f"base: {origin(comparison.base)}",
        f"new: {origin(comparison.new)}",
        *(f"differs: {name}: {old}, now {now}" for name, old, now in comparison.differs),
        *advice(comparison),
    ]
    frame = to_frame(comparison)
    filled = [name for name in SHOWN if (frame[name].notna() & (frame[name] != "")).any()]
    return as_html(lines, frame[filled])
