"""The terminal's width, and printed and wrapped lines."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from typing import IO, TYPE_CHECKING

from rich.cells import cell_len, chop_cells

from opgrip.cli.command import printable

if TYPE_CHECKING:
    from rich.console import Console

MOST = 120  # maximum length of a text in a table, in characters
ELLIPSIS = "…"
# patterns of allowed line breaks, preferred ones first: between words, after separators, next to numbers
_BREAKS = tuple(
    map(
        re.compile,
        (
            r"(?<=\s)(?=\S)",
            # a point separates unless a digit follows
            r"(?<=[,:/_])|(?<=\.)(?=[^\d.])|(?<=[a-z]-)(?=[a-z])",
            r"(?<![\d.])(?=[\d.])|(?<=[\d.])(?![\d.])",
        ),
    )
)
_CUT_NUMBER = re.compile(r"[\d.]*\d\.?$")


def shorten(text: str, most: int = MOST) -> str:
    # cut first, because a trace may hold texts of megabytes
    shown = printable(text[: most + 1])
    if len(shown) <= most:
        return shown
    head, following = shown[: most - 1], shown[most - 1]
    if following.isdigit() or following == ".":
        head = _CUT_NUMBER.sub("", head)
    return f"{head}{ELLIPSIS}"


def fold(text: str, width: int) -> list[str]:
    """Return the text as lines of at most `width` terminal columns, broken between words where possible."""
    lines = [""]
    for piece in _pieces(text, width, _BREAKS):
        if cell_len((lines[-1] + piece).rstrip()) <= width:
            lines[-1] += piece
        else:
            lines.append(piece)
    return [line.rstrip() for line in lines if line.strip()] or [""]


def _pieces(text: str, width: int, breaks: Sequence[re.Pattern[str]]) -> Iterator[str]:
    if cell_len(text.rstrip()) <= width:
        yield text
    elif breaks:
        for piece in breaks[0].split(text):
            yield from _pieces(piece, width, breaks[1:])
    else:
        yield from chop_cells(text, width)


def console_for(file: IO[str] | None = None, stderr: bool = False) -> Console:
    """Return a rich console that writes to `file`, or without a file to stderr or stdout; it respects NO_COLOR."""
    # this file and other files that print import rich late, to keep `--help` fast
    from rich.console import Console

    plain = bool(os.environ.get("NO_COLOR"))
    return Console(file=file, stderr=stderr, highlight=False, color_system=None if plain else "auto")


def print_line(line: str, file: IO[str], style: str = "", indent: int = 0) -> None:
    """Print a line to a file; on a terminal, wrap it to the width.

    indent : number of spaces in front of the second and later lines of a wrapped line
    """
    from rich.text import Text

    console = console_for(file)
    parts = fold(line, console.width) if console.is_terminal else [line]
    if len(parts) > 1 and indent:
        parts = [line[:indent] + part for part in fold(line[indent:], console.width - indent)]
        parts[1:] = [" " * indent + part[indent:] for part in parts[1:]]
    for part in parts:
        console.print(Text(part.rstrip(), style), soft_wrap=True)
