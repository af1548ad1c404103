"""The terminal, or what stands in its place."""

from __future__ import annotations

import os
from typing import IO

from rich.console import Console
from rich.text import Text

from opgrip.cli.folding import fold


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
