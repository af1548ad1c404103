"""What a report is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pandas as pd

from opgrip.cli.plugins import Registry
from opgrip.errors import UserError
from opgrip.replay.results.results import Result

Write = Callable[[Sequence[Result], Mapping[str, Any], IO[Any]], None]
"""Writes rows to a file, of text unless the report is `binary`, the header saying where they come from."""
Read = Callable[[Path], pd.DataFrame]


@dataclass(frozen=True, slots=True)
class Report:
    """A form that results are written in.

    Attributes
    ----------
    needs : name of the analysis without which there is nothing to write; empty for none
    read : gives the rows of such a file, to add others, its header in their `attrs`; None where they cannot be had
        back. It raises what reading a damaged file raises: OSError, ValueError, KeyError, TypeError
    binary : whether it writes bytes
    package : what is imported to write it, and the extra that brings that; empty for nothing that may be missing
    """

    write: Write
    needs: str = ""
    read: Read | None = None
    binary: bool = False
    package: tuple[str, str] | tuple[()] = ()


reports: Registry[Report] = Registry("opgrip.replay.reports", "opgrip.reports")
"""Reports by the suffix of the files that they write."""


def report(suffix: str, **about: Any) -> Callable[[Write], Write]:
    """A decorator that enters a function as the `write` of a report, whose other attributes are `about`."""

    def enter(write: Write) -> Write:
        reports.register(suffix)(Report(write, **about))
        return write

    return enter


def report_for(path: Path) -> Report:
    """What writes results to a file of that name.

    Raises
    ------
    UserError : where its suffix says no form
    """
    named_report = reports.get(path.suffix)
    if named_report is None:
        raise UserError(f"{path} has no known form", f"end its name in {', '.join(reports.names())}")
    return named_report
