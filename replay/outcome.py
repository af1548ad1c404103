"""What a replay gives as a whole: its rows, and where they come from."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from opgrip.replay.measuring.results import Result, summarize
from opgrip.replay.reports import report_for
from opgrip.replay.reports.cells import load_results, rows_in, to_frame
from opgrip.replay.reports.reading import header_of
from opgrip.traces.errors import UserError, in_words_of_python
from opgrip.traces.output import cannot_be_written, whole_file

SHOWN = ("case", "op", "shapes", "count", "share", "mode", "status", "captured_us", "median_us", "ratio", "error")
"""Columns that a notebook shows, as far as a row has something in them; `Results.frame` has all."""


@dataclass(frozen=True, slots=True, repr=False)
class Results:
    """The rows of a replay.

    Attributes
    ----------
    rows : one a case and way to run it, in the table's order
    header : the trace, the versions and the device that they come from
    """

    rows: Sequence[Result]
    header: dict[str, Any]

    @property
    def frame(self) -> pd.DataFrame:
        """One row a result, in all columns."""
        return to_frame(self.rows)

    def save(self, path: str | Path, force: bool = False) -> None:
        """Write them to a file, in the form that its suffix says, such as `.json`, `.csv` or `.xlsx`.

        Raises
        ------
        UserError : for another suffix, or where the file exists and `force` is not given, or cannot be written
        """
        with in_words_of_python():
            write_results(self.rows, self.header, Path(path), force)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Result]:
        return iter(self.rows)

    def __repr__(self) -> str:
        of_trace = f" of {self.header['trace']}" if "trace" in self.header else ""
        return f"<Results{of_trace}: {summarize(list(self.rows))}>"

    def _repr_html_(self) -> str:
        frame = self.frame[list(SHOWN)].dropna(axis="columns", how="all")
        return frame.to_html(index=False, max_rows=40, float_format="{:.4g}".format, border=0)


def read_run(path: str | Path) -> Results:
    """The results of a file that `opreplay -o` wrote, or that it kept.

    Raises
    ------
    UserError : where the file is not there or is not of a kind that can be read
    """
    frame = load_results(path)
    return Results(rows_in(frame, Path(path)), header_of(frame.attrs, Path(path)))


def write_results(rows: Sequence[Result], header: Mapping[str, Any], path: Path, force: bool) -> None:
    """Write rows as the file's suffix says; raises as `Results.save` does."""
    report = report_for(path)
    content: io.BytesIO | io.StringIO = io.BytesIO() if report.binary else io.StringIO()
    report.write(rows, header, content)
    written = content.getvalue()
    try:
        with whole_file(path, force) as file:
            file.write(written.encode(errors="backslashreplace") if isinstance(written, str) else written)
    except UserError:
        raise
    except OSError as error:
        raise cannot_be_written(path, error) from error
