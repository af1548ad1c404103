"""Devices by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from opgrip.cli.error_causes import cause_of
from opgrip.errors import UserError

if TYPE_CHECKING:
    import torch


def parse_device(name: str) -> torch.device:
    """The device of that name, whether it is here or not.

    Raises
    ------
    UserError : where torch does not know it
    """
    import torch

    unknown = UserError(f"{name!r} is no device that torch knows", "name one such as cpu, cuda or cuda:1")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise unknown from error
    # torch keeps eight bits of an index: of cuda:256 it makes cuda:0
    if name.partition(":")[2] not in ("", str(device.index)):
        raise unknown
    return device


def check_device(name: str) -> torch.device:
    """The device of that name.

    Raises
    ------
    UserError : where torch does not know it or this machine lacks it
    """
    import torch

    device = parse_device(name)
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, ImportError, AttributeError) as error:
        kind = name if ":" in name else device.type.upper()
        problem = f"no {kind} device here: {cause_of(error)}"
        raise UserError(problem, "choose another with --device, such as cpu") from error
    return device
