"""Coarse numbers: what decides how long an operator takes, and no more."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

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
