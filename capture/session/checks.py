"""Whether what a capture is asked for goes together."""

from __future__ import annotations

from torch import nn

from opgrip.capture.program.capture_choices import DEVICE_TIMES, FULL, KERNELS, VALUES
from opgrip.capture.writing.recording_limits import Limits
from opgrip.errors import UserError


def check_choices(model: object, values: str, device_time: str) -> None:
    """Raise where an argument is nothing that a capture can do."""
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(
            f"model is a {type(model).__name__}, not a torch.nn.Module: opgrip.capture.capture builds one by name"
        )
    if values not in VALUES:
        raise UserError(f"{values!r} is no way to keep values", f"choose {' or '.join(VALUES)}")
    if device_time not in DEVICE_TIMES:
        raise UserError(f"{device_time!r} is no way to time a device", f"choose {' or '.join(DEVICE_TIMES)}")


def check_flight(last: int | None, path: object, values: str, device_time: str, limits: Limits) -> None:
    """Raise `UserError` where the last calls alone are to be kept, and something that needs all of them."""
    if last is None:
        return
    if last < 1:
        raise UserError(f"--last {last} keeps no call", "keep 1 or more")
    if str(path) == "-":
        raise UserError("--last writes a file when something happens", "name one with --output")
    if values == FULL:
        raise UserError("--values full keeps what --last forgets", "leave out one of them")
    if device_time == KERNELS:
        raise UserError("--device-time kernels is for some steps, and --last for all", "leave out one of them")
    if limits:
        raise UserError(
            "--max-calls, --max-bytes and --max-memory end a recording, and --last goes on", "leave out one"
        )
