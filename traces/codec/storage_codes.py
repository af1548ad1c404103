"""Numbers of storages as blocks of calls hold them, so that the rounds of a loop read, and compress, alike."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from opgrip.traces.codec.integer_text import Integers
from opgrip.traces.schema.records import NO_STORAGE

FAR = 999
"""Storages that are older than so many are written by their number."""


def encode_storages(numbers: Sequence[int] | NDArray[np.int64], newest: int) -> list[int]:
    """Numbers of storages as a block holds them, so that a loop's rounds read the same.

    A positive code is that much more than the largest number so far; 0 to `1 - FAR` is that much less than it; `-FAR`
    is `NO_STORAGE`; a lower code c is the number `-FAR - 1 - c`.
    """
    own = np.asarray(numbers, dtype=np.int64)
    # the largest before each
    largest = np.maximum.accumulate(np.concatenate([[newest], own]))[:-1]
    distance = largest - own
    near = np.where(distance < FAR, -distance, -FAR - 1 - own)
    codes: list[int] = np.where(own == NO_STORAGE, -FAR, near).tolist()
    return codes


def decode_storages(codes: list[int], newest: int) -> list[int]:
    """The numbers that `encode_storages` was given."""
    numbers = []
    for code in codes:
        if code > 0:
            newest += code
            numbers.append(newest)
        elif code > -FAR:
            numbers.append(newest + code)
        else:
            numbers.append(NO_STORAGE if code == -FAR else -FAR - 1 - code)
    return numbers


def decode_codes(codes: Integers, largest: Integers) -> Integers:
    """The same of arrays, (N,).

    Parameters
    ----------
    largest : the largest number so far, each time with that of the code
    """
    numbers = np.where(codes <= -FAR, -FAR - 1 - codes, largest + np.minimum(codes, 0))
    numbers[codes == -FAR] = NO_STORAGE
    return numbers
