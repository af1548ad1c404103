"""Cases before they run, as lines."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import IO

from opgrip.cli.command import printable
from opgrip.replay.cases.cases import Case
from opgrip.replay.results.results import describe_shapes

COLUMNS = ("case", "share", "count", "operator", "shapes")


def list_cases(cases: Sequence[Case], file: IO[str]) -> None:
    """Print a line a case: its number, share of time, calls, operator and arguments; a terminal's width is kept."""
    rows = [COLUMNS, *map(_cells, cases)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    most = shutil.get_terminal_size().columns if file.isatty() else None
    for case, share, count, operator, shapes in rows:
        numbers = f"{case:>{widths[0]}}  {share:>{widths[1]}}  {count:>{widths[2]}}"
        print(f"{numbers}  {operator:<{widths[3]}}  {shapes}"[:most].rstrip(), file=file)
    print(f"{len(cases)} cases" if len(cases) != 1 else "one case", file=file)


def _cells(case: Case) -> tuple[str, ...]:
    shapes = printable(describe_shapes(case.signature))
    return str(case.number), f"{case.share:.1%}", f"{case.count:,}", printable(case.op), shapes
