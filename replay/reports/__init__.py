"""Output formats of results, and options for the output."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from opgrip.cli.options import EFFORT, OUTPUT, option, titled
from opgrip.cli.plugins import Registry
from opgrip.errors import UserError
from opgrip.replay.results.results import Result

if TYPE_CHECKING:
    import pandas as pd

# function that writes rows and their header to a file: a text file unless the report is `binary`
Write = Callable[[Sequence[Result], Mapping[str, Any], IO[Any]], None]
Read = Callable[[Path], "pd.DataFrame"]


@dataclass(frozen=True, slots=True)
class Report:
    """An output format of results.

    read : function that reads such a file, with the header in `attrs`; None if the format cannot be read
    """

    write: Write
    needs: str = ""  # name of the analysis that the format requires
    read: Read | None = None
    binary: bool = False
    package: tuple[str, str] | tuple[()] = ()  # package needed for writing, and the extra that installs it


reports: Registry[Report] = Registry("opgrip.replay.reports", "opgrip.reports")  # reports by file suffix


def report(suffix: str, **about: Any) -> Callable[[Write], Write]:
    def enter(write: Write) -> Write:
        reports.register(suffix)(Report(write, **about))
        return write

    return enter


def report_for(path: Path) -> Report:
    named_report = reports.get(path.suffix)
    if named_report is None:
        raise UserError(f"{path} has no known suffix", f"end its name in {', '.join(reports.names())}")
    return named_report


@titled("results")
@dataclass(frozen=True, slots=True)
class OutputOptions:
    output: Path | None = option(
        None,
        "also write the results; the suffix selects the format: .json, .csv, .parquet, .xlsx, .md, .xml "
        "(JUnit), .svg (plot)",
        short="-o",
        parse=Path,
        role=OUTPUT,
        common=True,
    )
    force: bool = option(False, "replace an existing file", short="-f", role=OUTPUT, common=True)
    append: bool = option(
        False,
        "add the rows to an existing .json or .csv file",
        only=("single cases",),
        needs=("--output",),
        role=OUTPUT,
    )
    resume: bool = option(
        False,
        "continue an interrupted replay to the same --output",
        only=("single cases",),
        needs=("--output",),
        role=OUTPUT,
        common=True,
    )
    list: bool = option(
        False, "list the selected cases without running them", only=("single cases",), role=OUTPUT, common=True
    )
    strict: bool = option(
        False,
        "exit with status 1 unless each case is ok or contended (other programs used the processors)",
        role=OUTPUT,
        common=True,
    )
    gate: tuple[str, ...] = option(
        (),
        "with --candidate: allowed slowdown; slower<=5%% limits each signature, total<=5%% their sum; can be "
        "repeated; exit status 1 if a limit is exceeded, 3 if that cannot be decided",
        repeated=True,
        metavar="GATE",
        only=("single cases",),
        needs=("--candidate", "--candidates"),
        role=OUTPUT,
    )
    store: Path | None = option(
        None,
        "folder to keep results in, under <machine>-<device>/ (default: $OPGRIP_STORE; if that is not set, they are "
        "not kept)",
        parse=Path,
        metavar="DIR",
        role=OUTPUT,
    )
    until_decided: str | None = option(
        None,
        "repeat the cases whose difference from BASE (a file or a stored run) is undecided, up to 20 times",
        metavar="BASE",
        only=("single cases",),
        role=EFFORT,
    )

    @property
    def may_replace(self) -> bool:
        return self.force or self.append or self.resume
