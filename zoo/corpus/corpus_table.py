"""Tables of a corpus, for the terminal and as files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import pandas as pd

from opgrip.cli.command import counted, printable
from opgrip.cli.output_files import csv_text, whole_file, write_parquet_table
from opgrip.cli.terminal import print_line
from opgrip.display.tables import TableColumn, print_table
from opgrip.errors import UserError
from opgrip.zoo.corpus.corpus import Corpus
from opgrip.zoo.corpus.summaries import Summary

WRITTEN = (".json", ".csv", ".md", ".parquet")


def check_form(path: Path) -> None:
    """Raise `UserError` unless the suffix of an output path is one of the formats that `write_table` writes."""
    if path.suffix not in WRITTEN:
        raise UserError(
            f"{path} is not the name of a {', '.join(WRITTEN[:-1])} or {WRITTEN[-1]} file",
            "choose a name with one of these suffixes",
        )


def write_summary(corpus: Corpus, summary: Summary, path: Path, force: bool) -> None:
    """Write all rows of a summary table to a file; a JSON file also lists the traces of the corpus."""
    write_table(summary.table, path, force, facts_of(corpus, summary))


def write_table(table: pd.DataFrame, path: Path, force: bool, facts: Mapping[str, Any]) -> None:
    """Write a table in the format of the path's suffix.

    force : True to replace an existing file
    facts : fields to write in front of the rows if the format is JSON
    """
    check_form(path)
    with whole_file(path, force) as file:
        if path.suffix == ".parquet":
            write_parquet_table(table, file)
        elif path.suffix == ".csv":
            text = csv_text(map(str, table.columns), (row.values() for row in records(table)))
            file.write(text.encode(errors="backslashreplace"))
        elif path.suffix == ".md":
            file.writelines(f"{line}\n".encode(errors="backslashreplace") for line in _markdown(table))
        else:
            form = {**facts, "rows": records(table)}
            file.write(json.dumps(form, indent=1, allow_nan=False).encode() + b"\n")


def facts_of(corpus: Corpus, summary: Summary | None = None) -> dict[str, Any]:
    """Return facts about a corpus for a JSON file: its traces and notices, and for a summary the number of
    models of each source, and how many rows occur in all models or in only one.
    """
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
    """Return the rows of a table as dictionaries by column; missing values are None."""
    plain = table.astype(object).where(table.notna(), None)
    return [{str(name): cell for name, cell in row.items()} for row in plain.to_dict("records")]


def _markdown(table: pd.DataFrame) -> Iterator[str]:
    yield f"| {' | '.join(map(str, table.columns))} |"
    is_number = [pd.api.types.is_numeric_dtype(table[name]) for name in table.columns]
    yield f"| {' | '.join('---:' if number else '---' for number in is_number)} |"
    for row in records(table):
        yield f"| {' | '.join(_cell(str(name), cell) for name, cell in row.items())} |"


def _cell(name: str, cell: Any) -> str:
    """Return a cell as text for a Markdown table; a number is formatted as its column, `name`, requires."""
    if isinstance(cell, float):
        return f"{cell:.2%}" if name.endswith("share") else f"{cell:,.1f}"
    if isinstance(cell, int):
        return f"{cell:,}"
    return "" if cell is None else printable(cell).replace("|", "\\|").replace("`", "'").replace("<", "&lt;")


NUMBERS = {
    "share": TableColumn("share", "share", ".2%"),
    "models": TableColumn("models", "models", ",d"),
    "traces": TableColumn("traces", "traces", ",d", rank=2),
    "count": TableColumn("calls", "count", ",d", rank=1),
    "calls": TableColumn("calls", "calls", ",d", rank=1),
    "operators": TableColumn("operators", "operators", ",d", rank=1),
    "signatures": TableColumn("signatures", "signatures", ",d", rank=1),
    "own_operators": TableColumn("own operators", "own_operators", ",d", rank=1),
    "alike": TableColumn("alike", "alike", ".2%", rank=1),
    "median_us": TableColumn("median us", "median_us", ",.1f", rank=2),
    "time_us": TableColumn("ms", lambda row: row.time_us / 1e3, ",.1f", rank=3),
    "elements_p10": TableColumn("p10 elements", lambda row: int(row.elements_p10), ",d", rank=4),
    "elements_p50": TableColumn("median elements", lambda row: int(row.elements_p50), ",d", rank=3),
    "elements_p90": TableColumn("p90 elements", lambda row: int(row.elements_p90), ",d", rank=4),
}
# text columns by their name in the table; they follow the columns of numbers
TEXTS = {
    "op": TableColumn("operator", "op", least=24),
    "call": TableColumn("call", "call", least=24),
    "trace": TableColumn("trace", "trace", least=24),
    "model": TableColumn("model", "model", least=24),
    "family": TableColumn("family", "family", least=24),
    "dtypes": TableColumn("dtypes", "dtypes", least=24),
    "shapes": TableColumn("shapes", "shapes", least=24),
    "usual_dtypes": TableColumn("usual dtypes", "usual_dtypes", least=24, rank=3),
    "usual_shapes": TableColumn("usual shapes", "usual_shapes", below=True),
}


def print_summary(corpus: Corpus, summary: Summary, top: int, file: IO[str]) -> None:
    """Print the totals of the corpus, and the summary table of each source.

    top : number of rows to print for each source
    """
    for source in corpus.sources:
        own = corpus.of_source(source)
        table = summary.table[summary.table["source"] == source]
        _print_totals(own, source, file)
        if summary.tells_models and summary.models[source] > 1:
            common, alone = len(summary.common(source)), len(summary.unique(source))
            print_line(f"of {len(table):,} rows, {common:,} occur in all models, {alone:,} in only one", file)
        print()
        rows = list(table.head(top).itertuples())
        print_table(columns_of(table), rows, file, f"by {summary.by} ({len(table):,} in total)")


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
    """Return the columns of a table that are printed on a terminal, with their format."""
    is_number = {name: pd.api.types.is_numeric_dtype(table[name]) for name in table}
    columns = [column for name, column in NUMBERS.items() if is_number.get(name)]
    # a call begins with its operator
    texts = {name: column for name, column in TEXTS.items() if not (name == "op" and "call" in table)}
    return columns + [column for name, column in texts.items() if is_number.get(name) is False]
