"""What torch, a mode or another source has of a corpus, for people."""

from __future__ import annotations

from typing import IO

import pandas as pd

from opgrip.cli.command import printable
from opgrip.cli.terminal import print_line
from opgrip.display.tables import TableColumn, print_table
from opgrip.tools.corpus.coverage import summarize_coverage
from opgrip.tools.corpus.lacking import by_operator, describe_lacking
from opgrip.tools.corpus.sources import BOTH, describe_sources
from opgrip.traces.corpus import Corpus


def print_coverage(table: pd.DataFrame, file: IO[str]) -> None:
    """Print how many operators of each category the corpus has, and which it lacks."""
    public = table[table["is_public"]]
    covered = int(public["is_covered"].sum())
    others = int((~table["is_public"]).sum())
    print_line(
        f"{covered:,} of {len(public):,} public operators of torch are in the corpus, and {others:,} others", file
    )
    print()
    summary = summarize_coverage(table)
    columns = [
        _numbers("operators", summary["operators"]),
        _numbers("covered", summary["covered"]),
        _shares("share", summary["share"]),
        _texts("category", summary["category"]),
        _texts("missing", summary["missing"], below=True),
    ]
    print_table(columns, file, "by category")


def print_lacking(table: pd.DataFrame, top: int, file: IO[str]) -> None:
    """Print for each mode how much of the corpus it cannot run, then which operators these are, and why."""
    for line in describe_lacking(table):
        print_line(line, file)
    operators = by_operator(table)
    if operators.empty:
        return
    print()
    shown = operators.head(top)
    columns = [
        _shares("share", shown["share"]),
        _numbers("signatures", shown["signatures"]),
        _numbers("models", shown["models"]),
        _texts("mode", shown["mode"]),
        _texts("status", shown["status"]),
        _texts("operator", shown["op"]),
        _texts("reason of most", shown["reason"], below=True),
    ]
    print_table(columns, file, f"what cannot run ({len(operators):,} rows in all)")


def print_sources(corpus: Corpus, table: pd.DataFrame, top: int, file: IO[str]) -> None:
    """Print what all sources have, then what each has alone."""
    print_line(describe_sources(table), file)
    for name, own in table.groupby("has_it", sort=False):
        print()
        shown = own.head(top)
        columns = []
        for source in corpus.sources:
            if name == BOTH or source in str(name).split(","):
                columns.append(_shares(f"{source} share", shown[f"{source}_share"]))
                columns.append(_numbers("models", shown[f"{source}_models"]))
                columns.append(_numbers("signatures", shown[f"{source}_signatures"]))
        columns.append(_texts("operator", shown["op"]))
        if shown["by_way_of"].any():
            columns.append(_texts("by way of", shown["by_way_of"]))
        title = "in all sources" if name == BOTH else f"in {name} alone"
        print_table(columns, file, f"{title} ({len(own):,} in all)")


def _numbers(heading: str, cells: pd.Series) -> TableColumn:
    return TableColumn(heading, [f"{int(cell):,}" for cell in cells], rank=1)


def _shares(heading: str, cells: pd.Series) -> TableColumn:
    return TableColumn(heading, [f"{cell:.2%}" for cell in cells])


def _texts(heading: str, cells: pd.Series, below: bool = False) -> TableColumn:
    texts = [printable(cell) for cell in cells]
    return TableColumn(heading, texts, is_number=False, least=16, below=below, most=200 if not below else 2000)
