"""What a redaction leaves unchanged, the salt of its names, and coarse numbers."""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from opgrip.cli.output_files import cannot_be_written, partial_path, reason_of
from opgrip.errors import UserError

BITS = 3
"""Leading bits of a number that stay."""
LARGEST = (1 << 63) - 1


def coarse_int(value: int) -> int:
    """A whole number with its first bits alone, rounded towards zero: what was a valid index stays one."""
    size = abs(value)
    dropped = max(0, size.bit_length() - BITS)
    size = size >> dropped << dropped
    return size if value >= 0 else -size


def coarse_float(value: float) -> float:
    """The same of a float; zero, infinities and nan stay."""
    if not math.isfinite(value) or not value:
        return value
    mantissa, exponent = math.frexp(value)
    # a whole number of eighths, which a float of any width holds
    return math.ldexp(math.trunc(mantissa * (1 << BITS)) / (1 << BITS), exponent)


def coarse(value: int | float) -> int | float:
    """A number as either; a boolean as it is."""
    if isinstance(value, bool):
        return value
    return coarse_int(value) if isinstance(value, int) else coarse_float(value)


def rounded_up(value: int) -> int:
    """The next power of two, as large as 64 bits allow."""
    size = min(LARGEST, 1 << (abs(value) - 1).bit_length())
    return size if value >= 0 else -size


class IntegerMap:
    """Other whole numbers in the same order, of the same signs and about the same sizes, none of them larger.

    Each power of two has as many as it had, at equal distances. So equal numbers stay equal, different ones different,
    sorted ones sorted, zeros zero, and indices valid.

    Parameters
    ----------
    values : those that are mapped
    pinned : numbers that have their image elsewhere in the call: in its shapes, or among its scalars
    """

    def __init__(self, values: Iterable[int], pinned: Mapping[int, int] | None = None) -> None:
        pinned = pinned or {}
        distinct = set(values)
        self._images = {value: pinned[value] for value in distinct & pinned.keys()}
        taken = set(self._images.values())
        for sign in (1, -1):
            sizes = sorted(sign * value for value in distinct - self._images.keys() if sign * value > 0)
            self._spread(sizes, sign, {sign * image for image in taken})
        if 0 in distinct:
            self._images.setdefault(0, 0)

    def __getitem__(self, value: int) -> int:
        return self._images[value]

    def _spread(self, sizes: list[int], sign: int, taken: set[int]) -> None:
        for bits in sorted({size.bit_length() for size in sizes}):
            members = [size for size in sizes if size.bit_length() == bits]
            low, last = 1 << (bits - 1), members[-1]
            top = max(coarse_int(last), low + len(members) - 1)
            if bits < sizes[-1].bit_length():
                top = (1 << bits) - 1
            step = (top - low) / max(1, len(members) - 1)
            before = low - 1
            for place, size in enumerate(members):
                image = max(before + 1, low + int(step * place))
                while image in taken:
                    image += 1
                # pins can fill the range: the number is then the same as another
                before = image if image <= max(top, last) else low
                self._images[size * sign] = before * sign


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
