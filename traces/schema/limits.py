"""How much a file from a stranger may cost its reader: a small one neither fills the memory nor takes minutes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opgrip.errors import FormatError, UserError

LINE_BYTES = 16 << 20
"""Bytes of one line."""
LINE_ITEMS = 1 << 20
"""Lists, objects and what stands in them in one line: each takes some 70 bytes of memory, and two in the file."""
NESTING = 128
"""Lists and objects inside of each other; what works on arguments calls itself some four times for each."""
UNKNOWN_RECORDS = 20_000
"""Records of types that the reader does not know."""
UNKNOWN_NAMES = 1_000
"""Different types and fields that it does not know, which it counts by name."""
NAME_LENGTH = 1 << 16
"""Characters of an operator's, a module's or a file's name, and of a message."""
COLLISIONS = 50
"""Members of a set, or keys of a dictionary, that have the hash of another: to look for each costs one step more."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """What a compressed file may hold, which its own size sets: traces shrink to a fifth to a tenth.

    Attributes
    ----------
    least : for a file of no size
    per_byte : what each byte of the file adds
    """

    what: str
    least: int
    per_byte: float

    def of(self, file_bytes: int) -> int:
        """What a file of this size may hold."""
        return self.least + int(self.per_byte * file_bytes)


DECOMPRESSED = Allowance("bytes", 8 << 20, 100)
RECORDS = Allowance("records", 50_000, 0.1)
ITEMS = Allowance("values", 1 << 20, 5)


class SizeMeter:
    """Counts what one file gives, and refuses more than the bounds."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._packed_bytes = path.stat().st_size if path.name.endswith((".gz", ".zst")) else None
        self._totals: Counter[Allowance] = Counter()

    def check_pending(self, length: int) -> None:
        """Refuse a line that is longer than one may be, before the whole of it is in memory."""
        if length > LINE_BYTES:
            raise self.refusal(f"a line is longer than {LINE_BYTES >> 20} MB")

    def check_line(self, line: bytes) -> None:
        """Count a line."""
        self.check_pending(len(line))
        packed_bytes = self._packed_bytes
        # each is two characters at least
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
        """Refuse more records of unknown types than a newer version would write."""
        if count > UNKNOWN_RECORDS:
            raise self.refusal(f"more than {UNKNOWN_RECORDS:,} of its records are of types that no version has")

    def refusal(self, reason: str) -> UserError:
        """What to tell of a file that goes beyond a bound."""
        return UserError(
            f"{self._path} is refused ({reason})", "read it with --unbounded if you trust where it comes from"
        )


def check_nesting(line: bytes, form: Any) -> None:
    """Raise `FormatError` for JSON whose lists and objects stand too deep inside of each other."""
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
    """Raise `FormatError` for members of a set or keys of a dictionary that were chosen for their equal hashes."""
    if len(keys) - len(set(map(hash, keys))) > COLLISIONS:
        raise FormatError("keys whose hashes collide")
