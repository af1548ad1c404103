"""Kinds of files that are not traces, recognized by their first bytes, with advice on what to do with each."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from opgrip.cli.command import printable
from opgrip.errors import FormatError, shortened
from opgrip.traces.io.json_stream import CutText, TooLong, members

_RECORD = "record the program with opcapture"
LISTED = "make a trace with opcapture; opgrip trace convert --formats lists which files of other tools are read"
_EXPORT = "record a run of the model with opcapture; opcapture --model FILE.pt2 runs a program of torch.export"
_UNPACK = "unpack it, and name a file in it"
_SHAPES = """replay a row by opreplay --operator aten.mm --inputs '{"self": [M, K], "mat2": [K, N]}'"""
_RESULTS = "show it by opgrip results show"
_COLUMN = re.compile(r"[^\W\d][\w .()/%#-]*")
# maximum number of members or columns that are listed, and maximum number of characters of each
_NAMES, _NAME_LENGTH = 5, 40


@dataclass(frozen=True, slots=True)
class FileKind:
    """A kind of file that cannot be read as a trace.

    hint : advice on what to do with such a file
    """

    what: str
    hint: str = LISTED


_KINDS: Sequence[tuple[re.Pattern[bytes], FileKind]] = [
    (re.compile(pattern, re.DOTALL | re.IGNORECASE), FileKind(what, hint))
    for pattern, what, hint in (
        (rb"version https://git-lfs", "a git LFS pointer to a file that is not here", "get the file by git lfs pull"),
        (
            rb"\xff\xfe|\xfe\xff|(?:[\t\n\r -~]\0){4}|(?:\0[\t\n\r -~]){4}",
            "text in UTF-16",
            "convert it by iconv -f UTF-16 -t UTF-8",
        ),
        (rb"\xef\xbb\xbf", "text with a byte order mark", "remove its first three bytes by tail -c +4"),
        (
            rb"PK\x03\x04.{26}(?:[^/\0]{1,200}/(?:models/|data/weights/|data/constants/|archive_format)|"
            rb"serialized_exported_program|serialized_state_dict)",
            "a program of torch.export, which must run",
            "record it by opcapture --model FILE.pt2 -o program.jsonl",
        ),
        (rb"PK\x03\x04.*(?:data|constants)\.pkl|\x80\x02\x8a", "a pickle of torch.save, which is never read", _EXPORT),
        (rb"\x80[\x02-\x05]", "a pickle, which is never read", _EXPORT),
        (rb"PK\x03\x04", "a zip archive", "end its name in .zip"),
        (rb".{257}ustar", "a tar archive", "end its name in .tar, or .tar.gz if it is compressed"),
        (rb"\x1f\x8b", "compressed by gzip", "end its name in .gz"),
        (rb"\x28\xb5\x2f\xfd", "compressed by zstandard", "end its name in .zst"),
        (rb"7z\xbc\xaf\x27\x1c", "an archive of 7-Zip", _UNPACK),
        (rb"Rar!", "a RAR archive", _UNPACK),
        (rb"\xfd7zXZ", "compressed by xz", "decompress it by xz -d"),
        (rb"BZh[1-9]1AY", "compressed by bzip2", "decompress it by bzip2 -d"),
        (
            rb"PAR1",
            "a Parquet file without the columns op_name and args of BackendBench",
            f"{_RECORD}; opgrip results show prints results",
        ),
        (rb"SQLite format 3", "an SQLite database, as Nsight Systems exports", _RECORD),
        (rb"NVR\0", "a report of Nsight Compute", _RECORD),
        (rb"\x93NUMPY", "an array of NumPy", _RECORD),
        (rb".{6}\0\0\{\"", "a file of safetensors", _RECORD),
        (rb"\s*<(?:!doctype html|html)", "an HTML page", "download the file itself"),
        (rb"\s*<\?xml", "XML", LISTED),
        (rb'\s*\{.*"nvbench"\s*:', "a result of nvbench", _RECORD),
        (rb'\s*\{.*"trace_hash"\s*:', "a result of opreplay", _RESULTS),
        (rb"(?:\s*#[^\n]*\n)*(?:\s*\w+\s*:[^\n{]*\n)*\s*\w+\s*:?\s*\{\s*\w+\s*[:{]", "a prototxt", _RECORD),
        (
            rb"(?:\s*#[^\n]*\n)*\s*(?:import|from) \w[\w.]*(?:\s+import\b| as |\s*\n|,)",
            "a Python program",
            "record it with opcapture -- FILE",
        ),
    )
]


def kind_of(start: bytes) -> FileKind | None:
    """Return the kind of a file from its decompressed first bytes, or None if the kind is unknown."""
    kind_by_start = next((kind for pattern, kind in _KINDS if pattern.match(start)), None)
    return kind_by_start or _kind_of_json(start) or _kind_of_table(start)


def _kind_of_json(start: bytes) -> FileKind | None:
    text = start.lstrip()
    # a damaged record of a trace is not a file of another kind
    if not text.startswith((b"{", b"[")) or re.match(rb'\{\s*"type"', text):
        return None
    first, _, rest = text.partition(b"\n")
    names = list(_members(text))
    if text.startswith(b"["):
        return FileKind(f"a JSON list of objects with {_named('member', names)}") if names else None
    with suppress(ValueError, RecursionError):
        if isinstance(json.loads(first), dict) and rest.lstrip().startswith(b"{"):
            return FileKind(f"JSON lines with {_named('member', names)}")
    return FileKind(f"JSON with {_named('member', names)}") if names else None


def _members(text: bytes) -> Iterator[str]:
    with suppress(FormatError, CutText, TooLong):
        for name, value in members([text], "", strict=False):
            if not text.startswith(b"["):
                yield name
            elif isinstance(value, dict):
                yield from value
                return


def _kind_of_table(start: bytes) -> FileKind | None:
    lines = start.decode(errors="replace").splitlines()[:2]
    for separator in (",", "\t", ";"):
        with suppress(csv.Error):
            heading, row = (*csv.reader(lines, delimiter=separator), [], [])[:2]
            if len(row) == len(heading) > 1 and all(_COLUMN.fullmatch(name.strip()) for name in heading):
                hint = LISTED
                if {"M", "N", "K"} <= {name.strip().upper() for name in heading}:
                    hint = _SHAPES
                elif "median_us" in heading:
                    return FileKind("a result of opreplay", _RESULTS)
                return FileKind(f"a CSV table with {_named('column', heading)}", hint)
    return None


def _named(noun: str, names: Sequence[str]) -> str:
    shown = ", ".join(printable(shortened(name.strip(), _NAME_LENGTH)) for name in names[:_NAMES])
    more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
    return f"the {noun}{'s' if len(names) > 1 else ''} {shown}{more}"
