"""The file of a trace as it ships: compressed as far as zstd goes, and naming its recipe, not where it was made."""

from __future__ import annotations

import json
from pathlib import Path

from opgrip.traces.errors import UserError
from opgrip.traces.extras import needed
from opgrip.traces.output import whole_file
from opgrip.traces.streams import read_chunks
from opgrip.traces.zoo import ZooTrace

LEVEL = 19
"""The highest whose reader needs no more memory than usual."""


def recipe_command(trace: ZooTrace) -> list[str]:
    """What a trace's header says that it was made by."""
    return ["opcapture", *trace.arguments]


def pack(plain: Path, trace: ZooTrace, path: Path) -> Path:
    """Write a trace compressed, with its recipe as the command."""
    first, _, rest = plain.read_bytes().partition(b"\n")
    header = json.loads(first) | {"command": recipe_command(trace)}
    data = json.dumps(header, separators=(",", ":")).encode() + b"\n" + rest
    with whole_file(path, force=True) as file:
        file.write(needed("zstandard", "zstd").ZstdCompressor(level=LEVEL).compress(data))
    return path


def command_of(path: Path) -> list[str] | None:
    """The command that a trace's header names; None where it has none that can be read."""
    first = b""
    for chunk in read_chunks(path):
        first += chunk
        if b"\n" in chunk:
            break
    try:
        header = json.loads(first.partition(b"\n")[0])
        return list(map(str, header["command"]))
    except (ValueError, KeyError, TypeError, UserError):
        return None
