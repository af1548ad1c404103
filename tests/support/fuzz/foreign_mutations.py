"""Mutations of other tools' files: of their bytes and their JSON."""

from __future__ import annotations

import copy
import gzip
import json
from random import Random
from typing import Any

from foreign_seeds import ForeignSeed
from mutations import MOST_BYTES, OF_BYTES, RAW, Line, change_lines, dump

PACKED = (".gz",)  # suffixes that a mutant may get
TOKENS = (b"99999999999999999999", b"-1", b"1e999", b"NaN", b"null", b"__import__('os')", b"[" * 300, b"\x00" * 8, b"")


def foreign_mutant(seed: ForeignSeed, random: Random) -> ForeignSeed:
    files = dict(seed.files)
    name = random.choice(sorted(files))
    files[name] = _changed(files[name], random)
    if seed.opens == name and len(files) == 1 and random.random() < 0.1:
        packed = name + random.choice(PACKED)
        return ForeignSeed(seed.format_name, {packed: gzip.compress(files[name])}, packed)
    return ForeignSeed(seed.format_name, files, seed.opens)


def _changed(content: bytes, random: Random) -> bytes:
    if content[:2] == b"\x1f\x8b" and random.random() < 0.8:
        return gzip.compress(_changed(gzip.decompress(content), random))
    if random.random() < 0.7:
        content = _changed_json(content, random)
    for _ in range(random.choice((0, 1, 1, 2))):
        content = random.choice((*OF_BYTES, _put_token))(content, random)
    return content[:MOST_BYTES]


def _changed_json(content: bytes, random: Random) -> bytes:
    """Return content with its JSON changed, as one document or line by line, else with its text lines changed."""
    try:
        forms: list[Any] = [json.loads(content)]
        separator = b""
    except (ValueError, RecursionError):
        try:
            forms, separator = [json.loads(line) for line in content.splitlines() if line.strip()], b"\n"
        except (ValueError, RecursionError):
            return _changed_text(content, random)
    lines: list[Line] = [{"type": "file", "content": copy.deepcopy(form)} for form in forms]
    if not lines:
        return content
    change_lines(lines, random)
    pieces: list[bytes] = []
    for line in lines:
        pieces.append(dump(line.get("content")) if isinstance(line, dict) else b"")
        if sum(map(len, pieces)) > MOST_BYTES:
            break
    whole = separator.join(pieces)
    return _twice(whole, random) if random.random() < 0.1 else whole


def _twice(content: bytes, random: Random) -> bytes:
    """Return JSON text in which an object has one of its names twice."""
    place = content.find(b'": ', random.randrange(len(content) + 1))
    begin = content.rfind(b'"', 0, place) if place > 0 else -1
    return content if begin < 0 else content[:begin] + content[begin : place + 3] + b"0, " + content[begin:]


def _changed_text(content: bytes, random: Random) -> bytes:
    lines = content.split(b"\n")
    place = random.randrange(len(lines))
    match random.randrange(4):
        case 0:
            lines[place : place + 1] = [lines[place]] * random.choice((0, 2, 3, 1000))
        case 1:
            lines.insert(random.randrange(len(lines) + 1), lines[place])
        case 2:
            words = lines[place].split(b" ")
            words[random.randrange(len(words))] = random.choice((*TOKENS, *RAW))
            lines[place] = b" ".join(words)
        case _:
            lines[place] = lines[place] * random.choice((2, 10, 300))
    return b"\n".join(lines)


def _put_token(content: bytes, random: Random) -> bytes:
    place = random.randrange(len(content) + 1)
    return content[:place] + random.choice(TOKENS) + content[place + random.choice((0, 1, 4)) :]
