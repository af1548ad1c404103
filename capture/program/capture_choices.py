"""Values of a capture's options, and checks for options that cannot be combined."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from opgrip.errors import UserError

if TYPE_CHECKING:
    from opgrip.traces.analysis.redaction import Policy

SKETCH, FULL = VALUES = ("sketch", "full")  # what is kept of tensor values: a value model, or also the full values
VALUE_SHARE = 0.2  # share of the program's time that may be spent on observing values of later calls
# how a compiled region is recorded: as its original operators, or as one call
OPERATORS, OPAQUE = COMPILED = ("operators", "opaque")
# how calls on an accelerator are timed: with the accelerator's records of kernels if available, else with events;
# always with events before and after; always with records
AUTO, EVENTS, KERNELS = DEVICE_TIMES = ("auto", "events", "kernels")
KNOWN_EXTENSIONS = ("mmcv._ext",)  # extension modules whose functions are recorded if the program has loaded them
CALLS = 3  # maximum number of recorded calls of a gripped function, each with another signature
GRIPS = "grips"  # default folder for gripped samples; `samples` contains the ones that ship with opgrip


def check_choices(model: object, values: str, device_time: str) -> None:
    from torch import nn

    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(
            f"model is a {type(model).__name__}, not a torch.nn.Module: opgrip.capture.capture builds models by name"
        )
    if values not in VALUES:
        raise UserError(f"unknown values={values!r}", f"choose {' or '.join(VALUES)}")
    if device_time not in DEVICE_TIMES:
        raise UserError(f"unknown device_time={device_time!r}", f"choose {', '.join(DEVICE_TIMES[:-1])} or {KERNELS}")


def check_flight(last: int | None, path: object, values: str, device_time: str, has_limits: bool) -> None:
    if last is None:
        return
    if last < 1:
        raise UserError(f"--last {last} keeps no calls", "give a number of calls of at least 1")
    if str(path) == "-":
        raise UserError(
            "--last needs a file to write when the program fails or is stopped", "name the file with --output"
        )
    if values == FULL:
        raise UserError("--values full cannot be combined with --last", "leave out one of them")
    if device_time == KERNELS:
        raise UserError("--device-time kernels cannot be combined with --last", "leave out one of them")
    if has_limits:
        raise UserError(
            "--max-calls, --max-bytes and --max-memory end a recording, but --last records until the program ends",
            "leave out --last, or the limits",
        )


OUTPUT = "private.jsonl"  # the default name, of the script or model, would reveal what was recorded


def check_private(private: bool, salt_file: str | Path | None, values: str, grip_to: str | Path | None) -> None:
    if salt_file is not None and not private:
        raise UserError("--salt-file needs --private", "add --private")
    if not private:
        return
    if values == FULL:
        raise UserError(
            "--private cannot be combined with --values full, which writes the values", "leave out one of them"
        )
    if grip_to is not None:
        raise UserError(
            "--private cannot be combined with --grip-to, which writes source and values", "leave out one of them"
        )


def policy_of(private: bool, salt_file: str | Path | None) -> Policy | None:
    from opgrip.traces.analysis.redaction import Policy, salt_of

    if not private:
        return None
    return Policy() if salt_file is None else Policy(salt_of(Path(salt_file)))
