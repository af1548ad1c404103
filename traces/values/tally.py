"""How often each of many integers occurs."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from opgrip.traces.values.pieces import every_so_many

Integers1D = NDArray[np.int64]

WIDEST = 1 << 22
"""No range of more numbers than that is counted number by number."""
SORTED = 1 << 20
"""So many elements are sorted to be counted; of more, a sample is."""
SAMPLED = 1 << 15
HASHED = 1 << 18
"""Of about so many elements the distinct ones are counted, to estimate those of all."""


def tally(flat: Integers1D) -> tuple[Integers1D, Integers1D]:
    """Distinct values of integers (N,), ascending, and their counts."""
    low, high = int(flat.min()), int(flat.max())
    if is_narrow(low, high, len(flat)):
        histogram = np.bincount(flat - low if low else flat)
        values = histogram.nonzero()[0]
        return values + low, histogram[values]
    ranked = np.sort(flat)
    ends = (ranked[1:] != ranked[:-1]).nonzero()[0] + 1
    starts = np.concatenate([[0], ends])
    return ranked[starts], np.diff(starts, append=len(flat))


def is_narrow(low: int, high: int, count: int) -> bool:
    """Whether counting every number of a range is cheaper than sorting so many elements."""
    return high - low < min(max(4 * count, 1024), WIDEST)


def estimate(flat: Integers1D) -> tuple[Integers1D, Integers1D, int]:
    """Of very many elements, distinct values and counts of a sample, and an estimate of all distinct ones."""
    values, counts = tally(every_so_many(flat, SAMPLED))
    # all elements of a value fall into the same part of their hashes, so the distinct ones of a part tell of all
    bits = max(0, (len(flat) // HASHED).bit_length())
    hashed = (flat * np.int64(-7046029254386353131)) >> 32
    part = flat[(hashed & ((1 << bits) - 1)) == 0]
    distinct_in_part = len(tally(part)[0]) if len(part) else 0
    return values, counts, min(len(flat), max(len(values), distinct_in_part << bits))
