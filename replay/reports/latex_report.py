"""Results as a table for LaTeX, with booktabs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import IO, Any

from opgrip.cli.command import printable
from opgrip.replay.reports.report import report
from opgrip.replay.reports.table import table_of
from opgrip.replay.results.results import Result

SPECIAL = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "\\": r"\textbackslash{}",
    # after the end of a row these would be its options
    **{character: f"{{{character}}}" for character in "[]*"},
    "<": r"\textless{}",
    ">": r"\textgreater{}",
}
_SPECIAL = re.compile("|".join(map(re.escape, SPECIAL)))


def escaped(text: str) -> str:
    """Text as LaTeX sets it, what is not printable as an escape of Python's."""
    return _SPECIAL.sub(lambda match: SPECIAL[match[0]], printable(text))


def write_rows(names: Sequence[str], numbers: Sequence[bool], rows: Sequence[Sequence[str]], file: IO[str]) -> None:
    """A `tabular`.

    Parameters
    ----------
    numbers : of each column, whether it holds numbers, which stand to the right
    """
    file.write("% \\usepackage{booktabs}\n")
    file.write(f"\\begin{{tabular}}{{{''.join('r' if is_number else 'l' for is_number in numbers)}}}\n\\toprule\n")
    for place, row in enumerate([names, *rows]):
        file.write(" & ".join(map(escaped, row)) + " \\\\\n" + ("\\midrule\n" if place == 0 else ""))
    file.write("\\bottomrule\n\\end{tabular}\n")


@report(".tex")
def write_latex(results: Sequence[Result], header: Mapping[str, Any], file: IO[str]) -> None:
    """The columns of the table that is printed."""
    columns = table_of(results)
    rows = list(zip(*(column.cells for column in columns), strict=True))
    write_rows([column.heading for column in columns], [column.is_number for column in columns], rows, file)
