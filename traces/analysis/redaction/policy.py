"""Settings of a redaction, and the report of everything that is kept."""

from __future__ import annotations

import os
import re
import secrets
from collections import Counter
from collections.abc import Iterator
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

from opgrip.cli.output_files import cannot_be_written, partial_path, read_secret, reason_of
from opgrip.errors import UserError

# kinds of texts that `--keep` can keep: paths and classes of modules, functions, files and lines, labels of
# `record_function` and threads, the model's name, numbers and strings among arguments, exact small values
MODULES, FUNCTIONS, FILES, LABELS, MODEL, SCALARS, VALUES = KINDS = (
    *("modules", "functions", "files", "labels", "model", "scalars", "values"),
)
SALT_BYTES = 32
LEAST_DIFFERENT = 8  # minimum number of distinct bytes of a salt, because anyone could guess a salt of zeros


@dataclass(frozen=True, slots=True)
class Policy:
    """Settings for redacting a trace.

    salt : secret that hashes depend on, so that nobody without it can check a guessed name
    keep : kinds of content, out of `KINDS`, that are not redacted
    hide_operators : True to also hash names of custom operators and extension functions; they cannot be replayed then
    """

    salt: bytes = field(default_factory=lambda: secrets.token_bytes(SALT_BYTES), repr=False)
    keep: frozenset[str] = frozenset()
    hide_operators: bool = False

    def keeps(self, kind: str) -> bool:
        return kind in self.keep


def check_kept(kinds: tuple[str, ...]) -> frozenset[str]:
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise UserError(f"--keep {unknown[0]}: unknown kind of content", f"choose from {', '.join(KINDS)}")
    return frozenset(kinds)


def salt_of(path: Path) -> bytes:
    """Return the salt in a file; a missing file is created with a random salt."""
    if path.exists():
        return _read_salt(path)
    part, salt = partial_path(path), secrets.token_bytes(SALT_BYTES)
    try:
        number = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(number, "wb") as file:
            file.write(salt)
        # the ranks of a job create the file at the same time: linking lets exactly one succeed, with a whole file
        os.link(part, path)
    except FileExistsError:
        return _read_salt(path)
    except OSError as error:
        raise cannot_be_written(path, error) from error
    finally:
        part.unlink(missing_ok=True)
    return salt


def _read_salt(path: Path) -> bytes:
    try:
        salt = read_secret(path, 64 * SALT_BYTES + 1)
    except OSError as error:
        raise UserError(f"{path} cannot be read", reason_of(error)) from error
    if not SALT_BYTES <= len(salt) <= 64 * SALT_BYTES or len(set(salt)) < LEAST_DIFFERENT:
        raise UserError(
            f"{path} contains no salt", f"name a file that does not exist, or one of {SALT_BYTES} bytes or more"
        )
    return salt


ASKED = "kept by --keep"
HASH = re.compile(r"\bx[0-9a-f]{10}\b")
MOST = 100_000  # maximum number of distinct texts and numbers that the report lists; others are only counted


@dataclass(frozen=True, slots=True)
class Remaining:
    field: str
    kind: str
    value: str
    why: str


@dataclass(slots=True)
class RedactionReport:
    counts: Counter[Remaining] = field(default_factory=Counter)
    others: int = 0
    hashes: set[str] = field(default_factory=set)

    def add_text(self, name: str, kind: str, text: str, image: str, why: str) -> None:
        if image != text or HASH.search(image):
            self.hashes.update(HASH.findall(image))
        elif text:
            self._add(Remaining(".".join(name.split(".")[:2]), kind, text, why))

    def add_number(self, name: str, op: str, image: float, why: str) -> None:
        self._add(Remaining(name, "integer" if isinstance(image, int) else "float", f"{op}: {image}", why))

    def add_values(self, data: object) -> None:
        self._add(Remaining("values.data", "exact values", str(data), ASKED))

    def rows(self) -> Iterator[tuple[str, str, int, str]]:
        """Yield (field, kind, number of different values, reason) for each group of kept texts or numbers."""
        groups: Counter[tuple[str, str, str]] = Counter((entry.field, entry.kind, entry.why) for entry in self.counts)
        for (name, kind, why), count in sorted(groups.items()):
            yield name, kind, count, why

    def as_json(self) -> dict[str, Any]:
        rows = [
            {"field": entry.field, "kind": entry.kind, "value": entry.value, "why": entry.why, "count": count}
            for entry, count in sorted(self.counts.items(), key=lambda item: astuple(item[0]))
        ]
        return {"hashed_names": len(self.hashes), "left": rows, "not_listed": self.others}

    def _add(self, entry: Remaining) -> None:
        if entry in self.counts or len(self.counts) < MOST:
            self.counts[entry] += 1
        else:
            self.others += 1
