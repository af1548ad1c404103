"""What a corpus says, for people."""

from __future__ import annotations

from collections.abc import Callable
from typing import IO, Any

import pandas as pd

from opgrip.cli.command import printable
from opgrip.cli.plural import counted
from opgrip.cli.terminal import print_line
from opgrip.display.tables import TableColumn, print_table
from opgrip.zoo.corpus.corpus import Corpus
from opgrip.zoo.corpus.summaries import Summary


def _count(value: Any) -> str:
    return f"{int(value):,}"


def _percent(value: Any) -> str:
    return f"{value:.2%}"


def _ms(value: Any) -> str:
    return f"{value / 1e3:,.1f}"


def _us(value: Any) -> str:
    return f"{value:,.1f}"


NUMBERS: dict[str, tuple[str, Callable[[Any], str], int]] = {
    "share": ("share", _percent, 0),
    "models": ("models", _count, 0),
    "traces": ("traces", _count, 2),
    "count": ("calls", _count, 1),
    "calls": ("calls", _count, 1),
    "operators": ("operators", _count, 1),
    "signatures": ("signatures", _count, 1),
    "own_operators": ("its own", _count, 1),
    "alike": ("alike", _percent, 1),
    "median_us": ("median us", _us, 2),
    "time_us": ("ms", _ms, 3),
    "elements_p10": ("p10 elements", _count, 4),
    "elements_p50": ("median", _count, 3),
    "elements_p90": ("p90", _count, 4),
}
"""Columns of numbers: heading, form and rank."""
TEXTS: dict[str, tuple[str, int, bool]] = {
    "op": ("operator", 0, False),
    "call": ("call", 0, False),
    "trace": ("trace", 0, False),
    "model": ("model", 0, False),
    "family": ("family", 0, False),
    "dtypes": ("dtypes", 0, False),
    "shapes": ("shapes", 0, False),
    "usual_dtypes": ("usual dtypes", 3, False),
    "usual_shapes": ("usual shapes", 0, True),
}
"""Columns of text: heading, rank, and whether it may go below."""


def print_summary(corpus: Corpus, summary: Summary, top: int, file: IO[str]) -> None:
    """Print what the corpus is made of, then the table of each source."""
    for source in corpus.sources:
        own = corpus.of_source(source)
        table = summary.table[summary.table["source"] == source]
        _print_totals(own, source, file)
        if summary.tells_models and summary.models[source] > 1:
            common, alone = len(summary.common(source)), len(summary.unique(source))
            print_line(f"of {len(table):,} rows, all models have {common:,}, and one alone has {alone:,}", file)
        print()
        print_table(columns_of(table.head(top)), file, f"by {summary.by} ({len(table):,} in all)")


def _print_totals(corpus: Corpus, source: str, file: IO[str]) -> None:
    frame = corpus.frame
    words = [
        counted(frame["model"].nunique(), "model"),
        counted(len(corpus.members), "trace"),
        counted(int(frame["count"].sum()), "call"),
        counted(frame["key"].nunique(), "signature"),
        counted(frame["op"].nunique(), "operator"),
    ]
    print_line(f"{source}: {', '.join(words)}", file)


def columns_of(table: pd.DataFrame) -> list[TableColumn]:
    """The columns that a terminal shows of a table."""
    columns = [
        TableColumn(heading, [form(cell) for cell in table[name]], rank=rank)
        for name, (heading, form, rank) in NUMBERS.items()
        if name in table and pd.api.types.is_numeric_dtype(table[name])
    ]
    for name, (heading, rank, below) in TEXTS.items():
        # a call begins with its operator
        is_told = name == "op" and "call" in table
        if name in table and not is_told and not pd.api.types.is_numeric_dtype(table[name]):
            cells = [printable(cell) for cell in table[name]]
            columns.append(TableColumn(heading, cells, is_number=False, rank=rank, least=24, below=below))
    return columns
