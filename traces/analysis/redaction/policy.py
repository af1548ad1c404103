"""What a redaction leaves as it is, and the salt that its names are made with."""

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
"""What can be kept as it is: module paths and classes, functions, files and lines, labels of `record_function` and
threads, the model's name, numbers and strings among arguments, exact small values."""
SALT_BYTES = 32
LEAST_DIFFERENT = 8
"""Bytes of a salt: zeros are none, with which everybody could try out names."""


@dataclass(frozen=True, slots=True)
class Policy:
    """How a trace is redacted.

    Attributes
    ----------
    salt : what names are hashed with; without it nobody can try whether a name is one that they think of
    keep : of `KINDS`, what stays
    hide_operators : also hash names of operators and extension functions that are not torch's, which cannot be replayed
        then
    """

    salt: bytes = field(default_factory=lambda: secrets.token_bytes(SALT_BYTES), repr=False)
    keep: frozenset[str] = frozenset()
    hide_operators: bool = False

    def keeps(self, kind: str) -> bool:
        """Whether something stays as it is."""
        return kind in self.keep


def check_kept(kinds: tuple[str, ...]) -> frozenset[str]:
    """The kinds that stay; `UserError` for one that there is not."""
    if strange := [kind for kind in kinds if kind not in KINDS]:
        raise UserError(f"--keep {strange[0]} is nothing that is redacted", f"choose from {', '.join(KINDS)}")
    return frozenset(kinds)


def salt_of(path: Path) -> bytes:
    """The salt in a file, which is made, for its owner alone, where there is none.

    Raises
    ------
    UserError : for a file that cannot be read or made, or holds less than a salt
    """
    if path.exists():
        return _read_salt(path)
    part, salt = partial_path(path), secrets.token_bytes(SALT_BYTES)
    try:
        number = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(number, "wb") as file:
            file.write(salt)
        # whole or not there: the ranks of a job make it at the same time, and one does
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
