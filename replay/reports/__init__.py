"""Output formats of results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pandas as pd

from opgrip.cli.plugins import Registry
from opgrip.errors import UserError
from opgrip.replay.results.results import Result

# function that writes rows and their header to a file: a text file unless the report is `binary`
Write = Callable[[Sequence[Result], Mapping[str, Any], IO[Any]], None]
Read = Callable[[Path], pd.DataFrame]


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
