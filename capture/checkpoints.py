"""Weights from files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from opgrip.traces.errors import UserError

if TYPE_CHECKING:
    from torch import nn


def load_weights(model: nn.Module, path: Path) -> None:
    """Load a file of weights, by torch's loader that runs no code of the file.

    Raises
    ------
    UserError : where the file is not there, holds more than weights, or fits another model
    """
    import torch

    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"{path} is not a file of weights ({reason[:160]})", "save a state_dict with torch.save"
        ) from error
    state = state.get("state_dict", state) if isinstance(state, Mapping) else state
    try:
        model.load_state_dict(state)
    except (RuntimeError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"{path} does not fit {type(model).__name__} ({reason[:200]})", "choose its own checkpoint"
        ) from error
