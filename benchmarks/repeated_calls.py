"""Make traces of any length by repeating the calls of a captured one, in the file's own format."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from opgrip.cli.output_files import compress_to

_CALLS = b'{"type":"calls"'
_NOT_REPEATED = (b'{"type":"entered"', b'{"type":"device_times"')  # records that refer to calls by position
_START = re.compile(rb'"start_ns":(-?\d+)')
_DURATIONS = re.compile(rb'"duration_ns":\[([^]]*)\]')
_NEWEST = re.compile(rb'"newest":(-?\d+)')


def repeat_calls(source: Path, target: Path, calls: int, spread: float = 0.0) -> int:
    """Write a trace that repeats the calls of a complete uncompressed one until it has at least `calls`; return their
    number.

    Each round begins at the end of the one before, and its tensors have their own storages.

    spread : relative spread of the durations in later rounds, since hardly two calls of a program take the same time;
        0 for equal durations
    """
    noise = np.random.default_rng(0)
    first, *records, end = source.read_bytes().splitlines()
    total = json.loads(end)
    blocks = [line for line in records if line.startswith(_CALLS)]
    forms = [json.loads(line) for line in blocks]
    starts_ns = [form["start_ns"] for form in forms]
    end_ns = max(form["start_ns"] + sum(form["after_ns"]) + form["duration_ns"][-1] for form in forms)
    storages = 1 + max(form["newest"] + sum(code for code in form["storages"] if code > 0) for form in forms)
    rounds = -(-calls // total["calls"])
    total |= {"calls": rounds * total["calls"], "duration_ns": rounds * total["duration_ns"]}
    with target.open("wb") as file:
        sink = compress_to(file, target.name)
        sink.write(first + b"\n")
        sink.write(b"".join(line + b"\n" for line in records if not line.startswith(_NOT_REPEATED)))
        for number in range(1, rounds):
            shift_ns = number * (end_ns - min(starts_ns))
            lines = _shifted(blocks, shift_ns, number * storages)
            sink.write(b"".join((_spread(line, noise, spread) if spread else line) + b"\n" for line in lines))
        sink.write(json.dumps(total, separators=(",", ":")).encode() + b"\n")
        sink.flush()
        if sink is not file:
            sink.close()
    return int(total["calls"])


def _shifted(blocks: list[bytes], shift_ns: int, storages: int) -> Iterator[bytes]:
    for line in blocks:
        later = _START.sub(lambda match: b'"start_ns":%d' % (int(match[1]) + shift_ns), line, count=1)
        yield _NEWEST.sub(lambda match: b'"newest":%d' % (int(match[1]) + storages), later, count=1)


def _spread(line: bytes, noise: np.random.Generator, spread: float) -> bytes:
    def times(match: re.Match[bytes]) -> bytes:
        first = np.array(match[1].split(b","), dtype=np.float64)
        later = np.rint(first * noise.lognormal(0, spread, len(first))).astype(np.int64)
        return b'"duration_ns":[%s]' % ",".join(map(str, later.tolist())).encode()

    return _DURATIONS.sub(times, line, count=1)


def repeat_items(source: Path, target: Path, name: str, items: int) -> int:
    """Write another tool's file with the items of the list `name` repeated; return their number."""
    content = json.loads(source.read_text())
    lines = [json.dumps(item) for item in content.pop(name)]
    rounds = -(-items // len(lines))
    text = ",\n".join(lines)
    with target.open("w") as file:
        file.write(json.dumps(content)[:-1] + f'{", " if content else ""}"{name}": [\n')
        for number in range(rounds):
            file.write(f"{',' if number else ''}{text}\n")
        file.write("]}\n")
    return rounds * len(lines)
