"""Settings of a process for recordings on demand, and names of the recordings' files."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opgrip.capture.program.processes import FIELD, FIELDS, own_path, unused
from opgrip.cli.command import not_negative, positive
from opgrip.cli.option_types import interval
from opgrip.errors import UserError

STEPS, WARMUP = 3, 1
DEFAULT, PRIVATE_DEFAULT = "step-%h-%p-%n.jsonl", "private-%p-%n.jsonl"

_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
_ADVISED_SIGNALS = ("USR1", "USR2")
_OTHER_SIGNALS = ("KILL", "STOP", "INT", "TERM", "SEGV", "FPE", "ILL", "BUS", "ABRT", "CHLD")


@dataclass(frozen=True, slots=True)
class AgentSettings:
    name: str
    output: str = DEFAULT
    steps: int | None = STEPS
    seconds: float | None = None
    warmup: int = WARMUP
    step_module: str | None = None
    signal: str | None = None
    at_start: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


def default_settings() -> AgentSettings:
    return AgentSettings(program_name(), str(Path(DEFAULT).absolute()))


def program_name() -> str:
    return Path(sys.argv[0]).stem if getattr(sys, "argv", None) and sys.argv[0] else "python"


def check_pattern(pattern: str) -> None:
    strange = next((field for field in FIELD.findall(pattern) if field not in FIELDS), None)
    if strange is not None:
        fields = ", ".join(f"%{name}" for name in FIELDS)
        raise UserError(f"%{strange} in {pattern} is not a field", f"use {fields}")
    if not pattern.endswith(_SUFFIXES):
        raise UserError(
            f"{pattern} is not a valid name of a trace file", f"choose a name that ends in {', '.join(_SUFFIXES)}"
        )


def recording_path(pattern: str, number: int) -> Path:
    """Return an unused path for a recording of this process; `number` replaces `%n` in the pattern."""
    return unused(Path(own_path(pattern, number)))


def signal_of(name: str) -> signal.Signals:
    word = name.upper().removeprefix("SIG")
    number = getattr(signal, f"SIG{word}", None)
    if not isinstance(number, signal.Signals) or word in _OTHER_SIGNALS:
        advice = f"choose {' or '.join(_ADVISED_SIGNALS)}"
        raise UserError(f"{name} cannot be used to start a recording", advice)
    return number


def _switch(text: str) -> bool:
    if text not in ("0", "1"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither 1 nor 0")
    return text == "1"


# field of `AgentSettings` or option of `Capture`, and parser, of each environment variable
VARIABLES: dict[str, tuple[str, Callable[[str], Any]]] = {
    "OPGRIP_STEPS": ("steps", positive),
    "OPGRIP_SECONDS": ("seconds", interval),
    "OPGRIP_WARMUP": ("warmup", not_negative),
    "OPGRIP_STEP_MODULE": ("step_module", str),
    "OPGRIP_SIGNAL": ("signal", lambda name: signal_of(name) and name),
    "OPGRIP_PRIVATE": ("private", _switch),
}


def settings_of(environment: Mapping[str, str]) -> AgentSettings:
    pattern = environment["OPGRIP_CAPTURE"]
    check_pattern(pattern)
    values: dict[str, Any] = {}
    for variable, (name, parse) in VARIABLES.items():
        text = environment.get(variable)
        if not text:
            continue
        try:
            values[name] = parse(text)
        except argparse.ArgumentTypeError as error:
            raise UserError(f"{variable}: {error}") from error
    options = {"private": True} if values.pop("private", False) else {}
    at_start = "steps" in values and "signal" not in values
    if "seconds" in values:
        values.setdefault("steps", None)
    output = str(Path(pattern).absolute())
    return AgentSettings(program_name(), output, at_start=at_start, options=options, **values)
