"""Numbers of storages as blocks of calls hold them, so that the rounds of a loop read, and compress, alike."""

from __future__ import annotations

from opgrip.traces.records import NO_STORAGE

FAR = 999
"""Storages that are older than so many are written by their number."""


def encode_storages(numbers: list[int], newest: int) -> list[int]:
    """Numbers of storages as a block holds them, so that a loop's rounds read the same.

    A positive code is that much more than the largest number so far; 0 to `1 - FAR` is that much less than it; `-FAR`
    is `NO_STORAGE`; a lower code c is the number `-FAR - 1 - c`.
    """
    codes = []
    for number in numbers:
        if number > newest:
            codes.append(number - newest)
            newest = number
        elif number == NO_STORAGE:
            codes.append(-FAR)
        else:
            distance = newest - number
            codes.append(-distance if distance < FAR else -FAR - 1 - number)
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
