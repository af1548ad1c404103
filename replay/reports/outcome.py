"""The results of a replay: result rows, and a header that says where they come from."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

import pandas as pd

from opgrip.cli.command import counted
from opgrip.cli.output_files import cannot_be_written, whole_file
from opgrip.cli.plugins import Registry
from opgrip.display.figures import as_html, in_style
from opgrip.errors import UserError, in_words_of_python
from opgrip.replay.reports import OutputOptions, report_for
from opgrip.replay.reports.cells import by_call_site, header_of, read_frame, rows_in, to_frame
from opgrip.replay.reports.fidelity import FIDELITY, Fidelity, fidelity_of
from opgrip.replay.reports.plots import PlotChoices, draw_fitting, draw_runs
from opgrip.replay.reports.results_table import print_results
from opgrip.replay.results.judgement import judgement_in
from opgrip.replay.results.results import VARIANT_COLUMNS, Result, summarize
from opgrip.replay.workers.journal import journal_path

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# columns that a notebook shows if they have values, in addition to columns that differ between variants;
# `Results.frame` has all columns
SHOWN = ("case", "op", "shapes", "count", "share", "mode", "status", "captured_us", "median_us", "speed_up", "error")

PRINTED = 60  # maximum number of rows that `print` shows


@dataclass(frozen=True, slots=True, repr=False)
class Results:
    """The rows of a replay.

    rows : one row for each variant of a case, in table order
    header : facts about the replay, such as trace, versions and device
    """

    rows: Sequence[Result]
    header: dict[str, Any]

    @staticmethod
    def load(path: str | Path) -> Results:
        """Load a file of results in `.json`, `.parquet` or `.csv`; `.csv` has no header.

        Raises UserError if the file cannot be read, or contains something else.
        """
        frame = read_frame(Path(path))
        return Results(rows_in(frame, Path(path)), header_of(frame.attrs, Path(path)))

    @property
    def frame(self) -> pd.DataFrame:
        """Data frame with one row for each result, and all columns."""
        return to_frame(self.rows)

    @property
    def by_call_site(self) -> pd.DataFrame:
        """Data frame with one row for each result and call site, to sum times by module, phase or line.

        ::

            results.by_call_site.groupby("module")["total_us"].sum()

        It has most columns of `frame`, and `line` (`file:line function`) and `total_us` (number of calls times replayed
        median). The values of `module`, `phase`, `count`, `share` and `captured_total_us` refer to the calls at the
        site.
        """
        return by_call_site(self.rows)

    @property
    def fidelity(self) -> Fidelity | None:
        """Comparison with the captured times; None unless a trace was replayed on the machine where it was captured."""
        return fidelity_of(self.rows, self.header)

    def save(self, path: str | Path, force: bool = False) -> None:
        """Write the rows to a file in the format that its suffix names, such as `.json`, `.csv` or `.xlsx`.

        Raises UserError if the suffix is unknown, the file exists and `force` is False, or the file cannot be
        written.
        """
        with in_words_of_python():
            write_results(self.rows, self.header, Path(path), force)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Result:
        return self.rows[index]

    def __iter__(self) -> Iterator[Result]:
        return iter(self.rows)

    def __repr__(self) -> str:
        of_trace = f" of {self.header['trace']}" if "trace" in self.header else ""
        return f"<Results{of_trace}: {summarize(list(self.rows))}>"

    def __str__(self) -> str:
        table = io.StringIO()
        print_results(self.rows[:PRINTED], table)
        left_out = len(self) - PRINTED
        more = f"and {counted(left_out, 'more row')}, see .frame\n" if left_out > 0 else ""
        return f"{table.getvalue()}{more}{self!r}"

    def plot(
        self,
        kind: str | None = None,
        *,
        beside: Mapping[str, Results] | None = None,
        op: str | None = None,
        case: str | None = None,
        by: str | None = None,
        over: str | None = None,
        title: str | None = None,
    ) -> Figure:
        """Return a matplotlib figure of the results, as `opgrip plot` draws it; Jupyter displays it.

        ::

            results.plot()                                          # the kind that fits the results
            results.plot("shapes", op="aten.conv*").savefig("convolutions.pdf")
            after.plot("history", beside={"before": before})

        kind : `modes`, `scaling`, `operators`, `shapes`, `roofline` or `history`; None selects `modes` if there are
            several modes, `scaling` if threads, batch or streams vary, else `operators`
        beside : other runs by name, drawn before these results; the label of these results is `this`
        op : glob pattern; draw only cases of operators whose names match
        case : draw only the case whose key starts with this
        by : `family`, `op` or `module`, by which cases are grouped
        over : column of the x axis
        title : title; by default trace, machine and version of torch

        Raises UserError if matplotlib is not installed, an argument is invalid for this kind, or there is nothing to
        draw.
        """
        runs = {**(beside or {}), "this": self}
        choices = PlotChoices(op, case, by, over, title)
        with in_words_of_python(), in_style():
            return draw_fitting(runs, choices) if kind is None else draw_runs(kind, runs, choices)

    def _repr_html_(self) -> str:
        frame = self.frame.assign(status=[row.marked_status for row in self.rows])
        timed = frame[frame["median_us"].notna()]
        varied = [name for name in VARIANT_COLUMNS if name not in SHOWN and timed[name].nunique(dropna=False) > 1]
        table = frame[[*SHOWN[:6], *varied, *SHOWN[6:]]].dropna(axis="columns", how="all")
        return as_html([repr(self)], table, lambda: draw_fitting({"": self}, PlotChoices()))


def write_results(rows: Sequence[Result], header: Mapping[str, Any], path: Path, force: bool) -> None:
    report = report_for(path)
    content: io.BytesIO | io.StringIO = io.BytesIO() if report.binary else io.StringIO()
    fidelity = fidelity_of(rows, header)
    facts = {} if fidelity is None else {FIDELITY: asdict(fidelity)}
    report.write(rows, {**header, **facts, **judgement_in(rows)}, content)
    written = content.getvalue()
    try:
        with whole_file(path, force) as file:
            file.write(written.encode(errors="backslashreplace") if isinstance(written, str) else written)
    except UserError:
        raise
    except OSError as error:
        raise cannot_be_written(path, error) from error


def is_completed(output: OutputOptions) -> bool:
    if not output.resume or output.output is None:
        return False
    return output.output.exists() and not is_interrupted(output.output) and not output.append


def is_interrupted(output: Path) -> bool:
    return journal_path(output).exists()


class Scorer(Protocol):
    """Computes scores from the results of `opreplay`; a package registers one with the entry point `opgrip.scorers`."""

    def check(self, header: Mapping[str, Any]) -> None:
        """Raise `UserError` if the header of a trace requests a score that cannot be computed."""

    def print_scores(self, results: Results, file: IO[str]) -> None:
        """Print the scores of the replay of one trace; print nothing if its header requests none."""

    def against(self, baseline: Path | None) -> Callable[[Results, IO[str]], None]:
        """Read a baseline, and return a function that prints the scores of several traces relative to it.

        baseline : None for the one that is installed
        """


scorers: Registry[Scorer] = Registry(None, "opgrip.scorers")
