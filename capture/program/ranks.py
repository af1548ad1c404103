"""Ranks of a distributed program, and file names that tell processes apart. Imports nothing that takes time."""

from __future__ import annotations

import os
from pathlib import Path


def rank() -> int | None:
    """The rank of this process, where a launcher such as torchrun started several; None elsewhere."""
    number, size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if not number.isdecimal() or not size.isdecimal() or int(size) < 2:
        return None
    return int(number)


def with_mark(path: str | Path, mark: str) -> Path:
    """A file name with a mark before its suffixes: `step.jsonl.zst` and `rank1` give `step.rank1.jsonl.zst`."""
    path = Path(path)
    stem, dot, suffixes = path.name.partition(".")
    return path.with_name(f"{stem}.{mark}{dot}{suffixes}")
