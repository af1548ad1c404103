"""What a redaction keeps, and the salt of its hashes."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path

from opgrip.cli.output_files import cannot_be_written, partial_path, reason_of
from opgrip.errors import UserError

MODULES, FUNCTIONS, FILES, LABELS, MODEL, SCALARS, VALUES = KINDS = (
    *("modules", "functions", "files", "labels", "model", "scalars", "values"),
)
"""What `--keep` leaves unchanged: module paths and classes, functions, files and lines, labels of `record_function` and
threads, the model's name, numbers and strings among arguments, exact small values."""
SALT_BYTES = 32
LEAST_DIFFERENT = 8
"""Distinct bytes that a salt must have: anyone could guess a salt of zeros and try out names."""


@dataclass(frozen=True, slots=True)
class Policy:
    """How to redact a trace.

    Attributes
    ----------
    salt : key of the hashes; without it nobody can check a guessed name
    keep : the `KINDS` that stay
    hide_operators : also hash the names of custom operators and extension functions, which then cannot be replayed
    """

    salt: bytes = field(default_factory=lambda: secrets.token_bytes(SALT_BYTES), repr=False)
    keep: frozenset[str] = frozenset()
    hide_operators: bool = False

    def keeps(self, kind: str) -> bool:
        """Return True if this kind stays unchanged."""
        return kind in self.keep


def check_kept(kinds: tuple[str, ...]) -> frozenset[str]:
    """Return the kinds to keep; raise `UserError` for an unknown one."""
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise UserError(f"--keep {unknown[0]} is nothing that is redacted", f"choose from {', '.join(KINDS)}")
    return frozenset(kinds)


def salt_of(path: Path) -> bytes:
    """Read the salt file, or create it, readable only by its owner, if it does not exist.

    Raises
    ------
    UserError : if the file cannot be read or created, or is too short or too regular for a salt
    """
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
        salt = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read", reason_of(error)) from error
    if not SALT_BYTES <= len(salt) <= 64 * SALT_BYTES or len(set(salt)) < LEAST_DIFFERENT:
        raise UserError(
            f"{path} holds no salt", f"name a file that does not exist, or one of {SALT_BYTES} bytes or more"
        )
    return salt
