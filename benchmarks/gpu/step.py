"""What a step of the check is, and what becomes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import torch

Facts = dict[str, Any]
"""What a step saw, for a reader elsewhere: numbers, words, lists of them."""


class WrongError(Exception):
    """What a step saw that should not be."""


class NotHereError(Exception):
    """Why a step cannot be taken on this machine."""


class Verdict(str, Enum):
    """What became of a step."""

    OK = "ok"
    WRONG = "wrong"
    NOT_HERE = "not here"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step ended with.

    Attributes
    ----------
    reason : of a verdict that is not ok, in a line
    seconds : that it took, with the start of its process
    """

    name: str
    verdict: Verdict
    reason: str = ""
    facts: Facts = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Place:
    """Where a step is taken.

    Attributes
    ----------
    device : as a user writes it, with or without an index
    folder : that it may write into
    top : cases of the shipped trace that are replayed
    """

    device: str
    folder: Path
    top: int

    @property
    def kind(self) -> str:
        """The type of the device, such as `cuda`."""
        return torch.device(self.device).type

    @property
    def module(self) -> Any:
        """The part of torch that knows it."""
        return getattr(torch, self.kind)


@dataclass(frozen=True, slots=True)
class Step:
    """Something that is tried, and judged.

    Attributes
    ----------
    run : gives what it saw; raises `WrongError` or `NotHereError`, and whatever else is wrong
    timeout_s : after which it is ended, and wrong
    needs_cuda : why it is for CUDA alone; empty where it is for any accelerator
    """

    name: str
    run: Callable[[Place], Facts]
    timeout_s: float = 150.0
    needs_cuda: str = ""

    @property
    def slug(self) -> str:
        """Its name as that of files."""
        return "".join(letter if letter.isalnum() else "-" for letter in self.name)


def expect(condition: object, message: str) -> None:
    """Raise `WrongError` where something does not hold."""
    if not condition:
        raise WrongError(message)


def expect_between(value: float, least: float, most: float, meaning: str) -> None:
    """Raise `WrongError` where a number is not within its bounds, or is none."""
    expect(least <= value <= most, f"{meaning} is {value:.4g}, not between {least:.4g} and {most:.4g}")
