"""Values of command-line options from their texts, for argparse, and the options that select cases by index."""

from __future__ import annotations

import argparse
import os
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from opgrip.cli.command import not_negative, positive, seed
from opgrip.cli.options import CASES, option, titled
from opgrip.errors import UserError

LEAST_BYTES = 1 << 20  # minimum size; a smaller one usually lacks its unit
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
UNITS_S = {"": 1, "s": 1, "min": 60, "h": 3600, "d": 86400}


def names(text: str) -> tuple[str, ...]:
    parts = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    if not all(parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of names separated by commas")
    return parts


def counts(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(positive(part) for part in text.split(",")))


def cpus(text: str) -> tuple[int, ...]:
    """Return the numbers of the processors in a text such as `0,2-3`, in ascending order."""
    numbers: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if match is None:
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of processors such as 0,2-3")
        numbers.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    if strange := numbers - os.sched_getaffinity(0):
        raise argparse.ArgumentTypeError(f"processor {min(strange)} is not available to this process")
    return tuple(sorted(numbers))


def image_size(text: str) -> tuple[int, int]:
    """Return height and width in pixels from a text such as `800x1333`, or `800` for a square."""
    match = re.fullmatch(r"([1-9]\d*)(?:x([1-9]\d*))?", text.lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 800x1333")
    return int(match[1]), int(match[2] or match[1])


def tolerance(text: str) -> float:
    return _number(text, "a tolerance", lambda number: 0 <= number < float("inf"))


# torch's names of dtypes, by the short names that torch and other tools use
SHORT_DTYPES = {
    "fp16": "float16",
    "fp32": "float32",
    "fp64": "float64",
    "bf16": "bfloat16",
    "half": "float16",
    "float": "float32",
    "double": "float64",
}


def floating_dtype(text: str) -> str:
    """Return the name of a floating-point dtype, such as `float32`, from its name or a short form such as `fp32`."""
    import torch

    dtype = getattr(torch, SHORT_DTYPES.get(text, text), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise argparse.ArgumentTypeError(f"{text!r} is not a floating-point dtype such as float32 or bfloat16")
    return str(dtype).removeprefix("torch.")


def share(text: str) -> float:
    return _number(text, "a share between 0 and 1", lambda number: 0 < number <= 1)


def percent(text: str) -> float:
    """Return a share above 0 and up to 1 from a text such as `5%` or `0.05`."""
    stripped = text.strip()
    if not stripped.endswith("%"):
        return share(stripped)
    try:
        return share(str(_number(stripped[:-1]) / 100))
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share such as 5%, above 0% and up to 100%") from error


def seconds(text: str) -> float:
    return _number(text, "a number of seconds", lambda number: 0 < number < 1e9)


def duration(text: str) -> float:
    return _number(text, "a number of seconds of at least 0", lambda number: 0 <= number < 1e9)


def interval(text: str) -> float:
    """Return the number of seconds in a text such as `10min`, `90s`, `2h` or `5`."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)\s*(s|min|h|d|)", text.strip().lower())
    if match is None or float(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time such as 10min, 90s or 2h")
    return float(match[1]) * UNITS_S[match[2]]


def byte_count(text: str) -> int:
    """Return the number of bytes for a text such as `8GB`, in powers of 1000."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?", text.strip().lower())
    if match is None or float(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 8GB")
    count = int(float(match[1]) * UNITS[match[2]])
    if count < LEAST_BYTES:
        least = f"at least {LEAST_BYTES >> 20} MiB is needed"
        raise argparse.ArgumentTypeError(f"{text!r} is {count:,} bytes, but {least}: add a unit, as in 8GB")
    return count


def _number(text: str, what: str = "a number", is_allowed: Callable[[float], bool] = lambda number: True) -> float:
    try:
        number = float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from error
    if not is_allowed(number):
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return number


def matches(name: str, patterns: Sequence[str]) -> bool:
    return not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)


INDEXED = 1 << 62  # number of cases above which `random.sample` cannot take a range


@titled("cases")
@dataclass(frozen=True, slots=True)
class Cut:
    start: int = option(
        0,
        "skip the cases before number N (counted from 0) of a table or configuration file",
        parse=not_negative,
        only=("single cases",),
        role=CASES,
    )
    stop: int | None = option(None, "stop before case number N", parse=positive, only=("single cases",), role=CASES)
    sample: int | None = option(
        None, "use only N of the cases, chosen at random", parse=positive, only=("single cases",), role=CASES
    )
    sample_seed: int = option(
        0,
        "random seed for --sample (default: %(default)s)",
        parse=seed,
        metavar="N",
        only=("single cases",),
        role=CASES,
    )

    @property
    def takes_all(self) -> bool:
        return not self.start and self.stop is None and self.sample is None

    def size(self, count: int) -> int:
        size = max(0, min(count, count if self.stop is None else self.stop) - self.start)
        return size if self.sample is None else min(size, self.sample)

    def places(self, count: int) -> Sequence[int]:
        stop = min(count, count if self.stop is None else self.stop)
        if count and stop <= self.start:
            end = "" if self.stop is None else f" to --stop {self.stop}"
            raise UserError(
                f"no case is left from --start {self.start}{end}", f"the file has {count:,} cases, numbered from 0"
            )
        places = range(self.start, stop)
        if self.sample is None or self.sample >= stop - self.start:
            return places
        chance = random.Random(self.sample_seed)
        if stop - self.start < INDEXED:
            return sorted(chance.sample(places, self.sample))
        drawn: set[int] = set()
        while len(drawn) < self.sample:
            drawn.add(chance.randrange(self.start, stop))
        return sorted(drawn)
