"""The terminal: its width, printing, and text folded into lines."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import IO

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from opgrip.cli.command import printable

MOST = 120
"""Characters of a text that a table shows."""
ELLIPSIS = "…"
_WORDS = re.compile(r"(?<=\s)(?=\S)")
# after a separator; a point is one where no digit follows
_PIECES = re.compile(r"(?<=[,:/_])|(?<=\.)(?=\D)|(?<=[a-z]-)(?=[a-z])")
_IN_NUMBERS = set("0123456789.")
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


def fold(text: str, width: int, joint: str = "") -> list[str]:
    """A text in lines of at most so many characters, broken between words, then after separators.

    Parameters
    ----------
    joint : ends each line that another one follows, as a backslash in a command, whose words are not broken then
    """
    if cell_len(text) <= width:
        return [text]
    width -= cell_len(joint)
    lines = [""]
    for piece in _WORDS.split(text) if joint else _pieces(text, width):
        if cell_len((lines[-1] + piece).rstrip()) <= width:
            lines[-1] += piece
        else:
            lines.append(piece)
    parts = [line.rstrip() for line in lines if line.strip()]
    return [*(f"{part}{joint}" for part in parts[:-1]), *parts[-1:]]


def _pieces(text: str, width: int) -> Iterator[str]:
    """Parts of a text that stand in one line each."""
    for word in _WORDS.split(text):
        if cell_len(word.rstrip()) <= width:
            yield word
            continue
        for piece in _PIECES.split(word):
            rest = piece
            while cell_len(rest.rstrip()) > width:
                place = _break_in(rest, width)
                yield rest[:place]
                rest = rest[place:]
            yield rest


def _break_in(word: str, width: int) -> int:
    """Where a word is broken that is wider than a line: not between two digits, unless a number alone is as wide."""
    most = next((place for place in range(len(word), 1, -1) if cell_len(word[:place]) <= width), 1)
    return next((place for place in range(most, 0, -1) if not {word[place - 1], word[place]} <= _IN_NUMBERS), most)


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
