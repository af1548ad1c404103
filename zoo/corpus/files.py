"""What a corpus says, as files."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import pandas as pd

from opgrip.cli.command import printable
from opgrip.cli.output_files import quoted, whole_file
from opgrip.cli.plugins import needed
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
