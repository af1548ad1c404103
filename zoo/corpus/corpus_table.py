"""The tables of a corpus, for people and as files."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import pandas as pd

from opgrip.cli.command import printable
from opgrip.cli.output_files import quoted, whole_file
from opgrip.cli.plugins import needed
from opgrip.cli.plural import counted
from opgrip.cli.terminal import print_line
from opgrip.display.tables import TableColumn, print_table
from opgrip.errors import UserError
from opgrip.zoo.corpus.corpus import Corpus
from opgrip.zoo.corpus.summaries import Summary

WRITTEN = (".json", ".csv", ".md", ".parquet")


def check_form(path: Path) -> None:
    """Raise `UserError` where no table is written to a file of that name, or what writes it is missing."""
    if path.suffix not in WRITTEN:
        raise UserError(f"{path} is neither {', '.join(WRITTEN[:-1])} nor {WRITTEN[-1]}", "name one of these")
    if path.suffix == ".parquet":
        needed("pyarrow", "results")


def write_summary(corpus: Corpus, summary: Summary, path: Path, force: bool) -> None:
    """Write all rows of a table; as JSON, with which traces it is of."""
    write_table(summary.table, path, force, facts_of(corpus, summary))


def write_table(table: pd.DataFrame, path: Path, force: bool, facts: Mapping[str, Any]) -> None:
    """Write a table as its file's suffix says; as JSON with some facts before its rows."""
    check_form(path)
    with whole_file(path, force) as file:
        if path.suffix == ".parquet":
            _write_parquet(table, file)
        elif path.suffix == ".csv":
            file.write(_csv(table).encode(errors="backslashreplace"))
        elif path.suffix == ".md":
            file.writelines(f"{line}\n".encode(errors="backslashreplace") for line in _markdown(table))
        else:
            form = {**facts, "rows": records(table)}
            file.write(json.dumps(form, indent=1, allow_nan=False).encode() + b"\n")


def facts_of(corpus: Corpus, summary: Summary | None = None) -> dict[str, Any]:
    """Of which traces something is, and how many rows all models have and one alone."""
    members = [
        {name: getattr(member, name) for name in ("name", "source", "model", "run", "library", "family")}
        for member in corpus.members
    ]
    form: dict[str, Any] = {"traces": members, "notes": list(corpus.notes)}
    if summary is None:
        return form
    form |= {"by": summary.by, "models": dict(summary.models)}
    if summary.tells_models:
        form["common"] = {source: len(summary.common(source)) for source in summary.models}
        form["unique"] = {source: len(summary.unique(source)) for source in summary.models}
    return form


def records(table: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of a table as plain values, None for what is not known."""
    plain = table.astype(object).where(table.notna(), None)
    return [{str(name): cell for name, cell in row.items()} for row in plain.to_dict("records")]


def _csv(table: pd.DataFrame) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(table.columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows(
        {name: quoted(printable(cell)) if isinstance(cell, str) else cell for name, cell in row.items()}
        for row in records(table)
    )
    return text.getvalue()


def _markdown(table: pd.DataFrame) -> Iterator[str]:
    yield f"| {' | '.join(map(str, table.columns))} |"
    is_number = [pd.api.types.is_numeric_dtype(table[name]) for name in table.columns]
    yield f"| {' | '.join('---:' if number else '---' for number in is_number)} |"
    for row in records(table):
        yield f"| {' | '.join(_cell(str(name), cell) for name, cell in row.items())} |"


def _cell(name: str, cell: Any) -> str:
    """A cell that no text in it can end."""
    if isinstance(cell, float):
        return f"{cell:.2%}" if name.endswith("share") else f"{cell:,.1f}"
    if isinstance(cell, int):
        return f"{cell:,}"
    return "" if cell is None else printable(cell).replace("|", "\\|").replace("`", "'").replace("<", "&lt;")


def _write_parquet(table: pd.DataFrame, file: IO[bytes]) -> None:
    arrow, parquet = needed("pyarrow", "results"), needed("pyarrow.parquet", "results")
    parquet.write_table(arrow.Table.from_pandas(table, preserve_index=False), file, compression="zstd")


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
