"""Weights from files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from opgrip.cli.suggestions import did_you_mean
from opgrip.errors import MissingFileError, UserError, shortened

if TYPE_CHECKING:
    from torch import nn

_UNSUPPORTED = re.compile(r"Unsupported (?:global|class)\W.*?GLOBAL (\S+)")
"""How torch says of what class an object is that it does not make."""


def load_weights(model: nn.Module, path: Path) -> None:
    """Load a file of weights, by torch's loader that runs no code of the file.

    Raises
    ------
    UserError : where the file is not there, holds more than weights, or fits another model
    """
    import torch

    if not path.is_file():
        near = did_you_mean(str(path), [str(other) for other in path.parent.glob(f"*{path.suffix}")])
        raise MissingFileError(f"no file of weights {path}", near or "name one with --checkpoint")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        refused = _UNSUPPORTED.search(str(error))
        reason = f": it holds {refused[1]}, which torch does not load as weights" if refused else ""
        raise UserError(f"{path} is not a file of weights{reason}", "save a state_dict with torch.save") from error
    state = state.get("state_dict", state) if isinstance(state, Mapping) else state
    try:
        model.load_state_dict(state)
    except (RuntimeError, TypeError, AttributeError) as error:
        reason = shortened(" ".join(str(error).split()), 300)
        raise UserError(
            f"{path} does not fit {type(model).__name__}", f"choose its own checkpoint: {reason}"
        ) from error
