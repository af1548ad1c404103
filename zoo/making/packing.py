"""The file of a trace as it ships: compressed as far as zstd goes, and naming its recipe, not where it was made."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from opgrip.cli.compressed_files import Damage, read_chunks
from opgrip.cli.output_files import whole_file
from opgrip.cli.plugins import needed
from opgrip.errors import UserError
from opgrip.traces.zoo import ZooTrace

LEVEL = 19
"""The highest whose reader needs no more memory than usual."""
QUANTILE_DIGITS = 4
"""More are noise of the sample that quantiles were taken from, and would be a fifth of a file."""


def recipe_command(trace: ZooTrace) -> list[str]:
    """What a trace's header says that it was made by."""
    return ["opcapture", *trace.arguments]


def pack(plain: Path, trace: ZooTrace, path: Path) -> Path:
    """Write a trace compressed, with its recipe as the command."""
    first, *lines = plain.read_bytes().splitlines(keepends=True)
    header = _line(json.loads(first) | {"command": recipe_command(trace)})
    data = b"".join([header, *map(_with_short_quantiles, lines)])
    with whole_file(path, force=True) as file:
        file.write(needed("zstandard", "zstd").ZstdCompressor(level=LEVEL).compress(data))
    return path


def command_of(path: Path) -> list[str] | None:
    """The command that a trace's header names; None where it has none that can be read."""
    first = b""
    try:
        for chunk in read_chunks(path):
            first += chunk
            if b"\n" in chunk:
                break
        return list(map(str, json.loads(first.partition(b"\n")[0])["command"]))
    except (ValueError, KeyError, TypeError, UserError, Damage):
        return None


def short_quantiles(quantiles: Sequence[float]) -> list[float]:
    """Quantiles with few digits, in the same order.

    The ends stay, which are the range of the values, and so do equal ones: they say that many values are the same.
    """
    shortened = list(quantiles)
    for place in range(1, len(quantiles) - 1):
        before, value, after = quantiles[place - 1 : place + 2]
        short = float(f"{value:.{QUANTILE_DIGITS}g}")
        if before < value < after and shortened[place - 1] < short < after:
            shortened[place] = short
    return shortened


def _with_short_quantiles(line: bytes) -> bytes:
    if b'"quantiles":[' not in line:
        return line
    record = json.loads(line)
    quantiles = record.get("quantiles")
    if not isinstance(quantiles, list) or not all(isinstance(value, float) for value in quantiles):
        return line
    return _line(record | {"quantiles": short_quantiles(quantiles)})


def _line(record: dict[str, Any]) -> bytes:
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"
