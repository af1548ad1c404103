"""Which of torch's operators a corpus has, for people."""

from __future__ import annotations

from typing import IO

import pandas as pd

from opgrip.cli.command import printable
from opgrip.cli.terminal import print_line
from opgrip.display.tables import TableColumn, print_table
from opgrip.zoo.corpus.coverage import summarize_coverage


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


def _numbers(heading: str, cells: pd.Series) -> TableColumn:
    return TableColumn(heading, [f"{int(cell):,}" for cell in cells], rank=1)


def _shares(heading: str, cells: pd.Series) -> TableColumn:
    return TableColumn(heading, [f"{cell:.2%}" for cell in cells])


def _texts(heading: str, cells: pd.Series, below: bool = False) -> TableColumn:
    texts = [printable(cell) for cell in cells]
    return TableColumn(heading, texts, is_number=False, least=16, below=below, most=200 if not below else 2000)
