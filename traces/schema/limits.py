"""Limits that keep an untrusted file from filling its reader's memory or taking minutes to read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opgrip.errors import FormatError, UserError

LINE_BYTES = 16 << 20
"""bytes in one line"""
LINE_ITEMS = 1 << 20
"""lists, objects and their elements in one line; each takes about 70 bytes of memory, and two in the file"""
NESTING = 128
"""depth of nested lists and objects; functions on arguments recurse about four times per level"""
UNKNOWN_RECORDS = 20_000
"""records of types that the reader does not know"""
UNKNOWN_NAMES = 1_000
"""distinct unknown types and fields, which are counted by name"""
NAME_LENGTH = 1 << 16
"""characters in the name of an operator, a module or a file, and in a message"""
COLLISIONS = 50
"""set members or dictionary keys that have the hash of another one, each of which makes a lookup one step longer"""


@dataclass(frozen=True, slots=True)
class Allowance:
    """A limit on the content of a compressed file that depends on its size; traces compress to a fifth to a tenth.

    least : limit for an empty file
    per_byte : increase of the limit for each byte of the file
    """

    what: str
    least: int
    per_byte: float

    def of(self, file_bytes: int) -> int:
        return self.least + int(self.per_byte * file_bytes)


DECOMPRESSED = Allowance("bytes", 8 << 20, 100)
RECORDS = Allowance("records", 50_000, 0.1)
ITEMS = Allowance("values", 1 << 20, 5)


class SizeMeter:
    """Counter of a file's content that refuses files beyond the limits."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._packed_bytes = path.stat().st_size if path.name.endswith((".gz", ".zst")) else None
        self._totals: Counter[Allowance] = Counter()

    def check_pending(self, length: int) -> None:
        """Refuse a line that is too long before all of it is in memory."""
        if length > LINE_BYTES:
            raise self.refusal(f"a line is longer than {LINE_BYTES >> 20} MB")

    def check_line(self, line: bytes) -> None:
        """Count a line, and refuse the file if a limit is exceeded."""
        self.check_pending(len(line))
        packed_bytes = self._packed_bytes
        # each item has at least two characters
        if packed_bytes is None and len(line) <= LINE_ITEMS:
            return
        items = line.count(b",") + line.count(b"[") + line.count(b"{")
        if items > LINE_ITEMS:
            raise self.refusal(f"a line holds more than {LINE_ITEMS:,} values")
        if packed_bytes is not None:
            for allowance, amount in ((DECOMPRESSED, len(line) + 1), (RECORDS, 1), (ITEMS, items)):
                self._totals[allowance] += amount
                if self._totals[allowance] > allowance.of(packed_bytes):
                    limit = allowance.of(packed_bytes)
                    raise self.refusal(f"its {packed_bytes:,} bytes decompress to more than {limit:,} {allowance.what}")

    def check_unknown(self, count: int) -> None:
        """Refuse a file with an implausibly large number of records of unknown types."""
        if count > UNKNOWN_RECORDS:
            raise self.refusal(f"more than {UNKNOWN_RECORDS:,} of its records are of types that no version has")

    def refusal(self, reason: str) -> UserError:
        return UserError(
            f"{self._path} is refused ({reason})", "read it with --unbounded if you trust where it comes from"
        )


def check_nesting(line: bytes, form: Any) -> None:
    """Raise `FormatError` for JSON with lists and objects that are nested too deeply."""
    if line.count(b"[") + line.count(b"{") <= NESTING:
        return
    level = [form]
    for _ in range(NESTING + 1):
        if not level:
            return
        level = [
            child
            for item in level
            for child in (item.values() if isinstance(item, dict) else item)
            if isinstance(child, dict | list)
        ]
    raise FormatError(f"a line nests deeper than {NESTING} levels")


def check_hashes(keys: Sequence[Hashable]) -> None:
    """Raise `FormatError` for set members or dictionary keys that were chosen to have equal hashes."""
    if len(keys) - len(set(map(hash, keys))) > COLLISIONS:
        raise FormatError("keys whose hashes collide")
