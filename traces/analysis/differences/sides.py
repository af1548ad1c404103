"""Which traces a side of a comparison is of: one, those of a folder, or those that match a pattern."""

from __future__ import annotations

from pathlib import Path

from opgrip.errors import UserError
from opgrip.traces.analysis.differences.side import SUFFIX, Side, read_day
from opgrip.traces.io.foreign_files import format_of
from opgrip.traces.table.trace import load

SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
PATTERN = "*?["


def paths_of(side: Path) -> list[Path]:
    """The traces of a side, in the order of their names.

    Raises
    ------
    UserError : for a folder or pattern of none
    """
    # a folder can be what another tool wrote
    if side.is_dir() and format_of(side) is None:
        paths = sorted(path for path in side.iterdir() if path.name.endswith(SUFFIXES))
        if not paths:
            raise UserError(f"{side} holds no traces", f"their names end in {', '.join(SUFFIXES)}")
        return paths
    if not side.exists() and any(letter in side.name for letter in PATTERN):
        paths = sorted(side.parent.glob(side.name))
        if not paths:
            raise UserError(f"no file matches {side}", "name a trace, a folder of them, or a pattern")
        return paths
    return [side]


def load_side(paths: list[Path], partial: bool, unbounded: bool) -> Side:
    """What traces have together; they are read one after the other, and none is kept."""
    side = Side()
    for path in paths:
        if path.name.endswith(SUFFIX):
            side.include(read_day(path))
        else:
            side.add(load(path, partial, unbounded))
    return side
