"""Define a step of the check, and its outcomes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import torch

Facts = dict[str, Any]
"""observations of a step, for a reader elsewhere: numbers, words, lists of them"""


class WrongError(Exception):
    """Wrong observation of a step."""


class NotHereError(Exception):
    """Reason why a step cannot run on this machine."""


class Verdict(str, Enum):
    """Result of a step."""

    OK = "ok"
    WRONG = "wrong"
    NOT_HERE = "not here"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Verdict of a step, with its reason.

    Attributes
    ----------
    reason : one line, for a verdict that is not ok
    seconds : duration, including the start of its process
    """

    name: str
    verdict: Verdict
    reason: str = ""
    facts: Facts = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Place:
    """Device and folder of a step.

    Attributes
    ----------
    device : as a user writes it, with or without an index
    folder : that it may write into
    top : number of cases of the shipped trace to replay
    """

    device: str
    folder: Path
    top: int

    @property
    def kind(self) -> str:
        """Return the type of the device, such as `cuda`."""
        return torch.device(self.device).type

    @property
    def module(self) -> Any:
        """Return torch's module for the device."""
        return getattr(torch, self.kind)


@dataclass(frozen=True, slots=True)
class Step:
    """One check.

    Attributes
    ----------
    run : returns its observations; raises `WrongError`, `NotHereError`, or any other error
    timeout_s : time limit, after which it is wrong
    needs_cuda : why it needs CUDA; empty if it works on any accelerator
    """

    name: str
    run: Callable[[Place], Facts]
    timeout_s: float = 150.0
    needs_cuda: str = ""

    @property
    def slug(self) -> str:
        """Return its name as a file name."""
        return "".join(letter if letter.isalnum() else "-" for letter in self.name)


def expect(condition: object, message: str) -> None:
    """Raise `WrongError` if `condition` is false."""
    if not condition:
        raise WrongError(message)


def expect_between(value: float, least: float, most: float, meaning: str) -> None:
    """Raise `WrongError` if a number is missing or outside its limits."""
    expect(least <= value <= most, f"{meaning} is {value:.4g}, not between {least:.4g} and {most:.4g}")
