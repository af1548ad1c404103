"""Devices by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from opgrip.traces.causes import cause_of
from opgrip.traces.errors import UserError

if TYPE_CHECKING:
    import torch


def check_device(name: str) -> torch.device:
    """The device of that name.

    Raises
    ------
    UserError : where torch does not know it or this machine lacks it
    """
    import torch

    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, ImportError, AttributeError) as error:
        hint = "choose another with --device, such as cpu"
        raise UserError(f"no device {name!r} here ({cause_of(error)})", hint) from error
    return device
