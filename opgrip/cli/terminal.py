"""The terminal: its width, printing, and text folded into lines."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from typing import IO

from rich.cells import cell_len, chop_cells
from rich.console import Console
from rich.text import Text

from opgrip.cli.command import printable

MOST = 120
"""Characters of a text that a table shows."""
ELLIPSIS = "…"
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
"""Where lines are broken: between words, else after separators, else beside numbers."""
_CUT_NUMBER = re.compile(r"[\d.]*\d\.?$")


def shorten(text: str, most: int = MOST) -> str:
    """A text, printable, of so many characters at most; an ellipsis stands for what is left out."""
    # before anything is made of it: a trace may hold texts of megabytes
    shown = printable(text[: most + 1])
    if len(shown) <= most:
        return shown
    head, following = shown[: most - 1], shown[most - 1]
    if following.isdigit() or following == ".":
        head = _CUT_NUMBER.sub("", head)
    return f"{head}{ELLIPSIS}"


def fold(text: str, width: int) -> list[str]:
    """Return the lines of a text that are not wider than `width`, and no number in two of them if that is possible."""
    lines = [""]
    for piece in _pieces(text, width, _BREAKS):
        if cell_len((lines[-1] + piece).rstrip()) <= width:
            lines[-1] += piece
        else:
            lines.append(piece)
    return [line.rstrip() for line in lines if line.strip()] or [""]


def _pieces(text: str, width: int, breaks: Sequence[re.Pattern[str]]) -> Iterator[str]:
    """Yield the parts of a text that stay in one line."""
    if cell_len(text.rstrip()) <= width:
        yield text
    elif breaks:
        for piece in breaks[0].split(text):
            yield from _pieces(piece, width, breaks[1:])
    else:
        yield from chop_cells(text, width)


def console_for(file: IO[str] | None = None, stderr: bool = False) -> Console:
    """A console on a file, or on one of the two of the process.

    With NO_COLOR set, it writes neither colours nor bold nor italic.
    """
    plain = bool(os.environ.get("NO_COLOR"))
    return Console(file=file, stderr=stderr, highlight=False, color_system=None if plain else "auto")


def print_line(line: str, file: IO[str], style: str = "", indent: int = 0) -> None:
    """Print a line, which folds where a terminal is narrower; what follows its first part begins after `indent`."""
    console = console_for(file)
    parts = fold(line, console.width) if console.is_terminal else [line]
    if len(parts) > 1 and indent:
        parts = [line[:indent] + part for part in fold(line[indent:], console.width - indent)]
        parts[1:] = [" " * indent + part[indent:] for part in parts[1:]]
    for part in parts:
        console.print(Text(part.rstrip(), style), soft_wrap=True)
