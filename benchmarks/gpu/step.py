"""Define a step of a check or a measurement, and its outcomes."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import torch

Facts = dict[str, Any]  # observations of a step, for a reader elsewhere: numbers, words, lists of them


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

    reason : reason of a verdict other than ok, in one line
    facts : numbers and texts that the step noted, whatever its verdict
    seconds : duration of the step, with the imports of its process unless these ran before
    """

    name: str
    verdict: Verdict
    reason: str = ""
    facts: Facts = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Place:
    """Device and files of a step.

    device : name of the device, with or without an index
    folder : folder that the step may write into
    top : number of cases of the shipped trace to replay
    facts : file to which `note` adds the facts of all steps
    step : name of the step
    is_small : True if a measurement uses small models and few cases, as in tests
    """

    device: str
    folder: Path
    top: int
    facts: Path
    step: str = ""
    is_small: bool = False

    @property
    def kind(self) -> str:
        """Return the type of the device, such as `cuda`."""
        return torch.device(self.device).type

    @property
    def module(self) -> Any:
        """Return torch's module for the device, such as `torch.cuda`."""
        return getattr(torch, self.kind)

    @property
    def kept(self) -> Path:
        """Return the folder of files that later steps read and that are added to the archive."""
        return self.folder.parent / "kept"

    def synchronize(self) -> None:
        """Wait for the device."""
        self.module.synchronize()

    def note(self, **facts: Any) -> None:
        """Add a line with these fields to the file of facts, on the disk at once, because the step may be killed."""
        note_facts(self.facts, self.step, facts)


@dataclass(frozen=True, slots=True)
class Step:
    """One check or measurement.

    run : function of the step; it notes facts, and raises `WrongError`, `NotHereError` or any other error
    timeout_s : time limit, after which the verdict is wrong
    needs_cuda : reason why the step needs CUDA; empty if it works on any accelerator
    least_s : remaining time below which the step is not started
    modules : modules that the step's process imports while the step before it runs
    """

    name: str
    run: Callable[[Place], None]
    timeout_s: float = 150.0
    needs_cuda: str = ""
    least_s: float = 0.0
    modules: tuple[str, ...] = ()

    @property
    def slug(self) -> str:
        """Return the step's name in a form that is valid as a file name."""
        return "".join(letter if letter.isalnum() else "-" for letter in self.name)


def note_facts(path: Path, step: str, facts: Facts) -> None:
    """Append a JSON line with the facts of the step named `step` to a file, and wait until it is on the disk."""
    line = json.dumps({"stage": step, "at": round(time.time(), 1), **facts}, default=str) + "\n"
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        # in one piece, because its process may be killed
        os.write(file, line.encode())
        os.fsync(file)
    finally:
        os.close(file)


def read_facts(path: Path, step: str) -> Facts:
    """Return the facts that the step named `step` has noted in a file; of a fact noted twice, the last."""
    facts: Facts = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        fact = json.loads(line)
        if fact.pop("stage") == step:
            del fact["at"]
            facts |= fact
    return facts


def expect(condition: object, message: str) -> None:
    """Raise `WrongError` if `condition` is false."""
    if not condition:
        raise WrongError(message)


def expect_between(value: float, least: float, most: float, meaning: str) -> None:
    """Raise `WrongError`, which calls the number `meaning`, unless `value` is from `least` to `most`."""
    expect(least <= value <= most, f"{meaning} is {value:.4g}, not between {least:.4g} and {most:.4g}")
