"""The model, inputs and step of a program."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from opgrip.cli.command import did_you_mean
from opgrip.errors import MissingFileError, UserError, shortened

# pattern of torch's message for a class that its safe loader rejects
_UNSUPPORTED = re.compile(r"Unsupported (?:global|class)\W.*?GLOBAL (\S+)")


def load_weights(model: nn.Module, path: Path) -> None:
    """Load a module's weights from a file with torch's safe loader, which runs no code from the file."""
    if not path.is_file():
        near = did_you_mean(str(path), [str(other) for other in path.parent.glob(f"*{path.suffix}")])
        raise MissingFileError(f"the file of weights {path} does not exist", near or "name one with --checkpoint")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        refused = _UNSUPPORTED.search(str(error))
        reason = f": it contains {refused[1]}, which torch does not load as weights" if refused else ""
        raise UserError(f"{path} is not a file of weights{reason}", "save a state_dict with torch.save") from error
    state = state.get("state_dict", state) if isinstance(state, Mapping) else state
    try:
        model.load_state_dict(state)
    except (RuntimeError, TypeError, AttributeError) as error:
        reason = shortened(" ".join(str(error).split()), 300)
        raise UserError(
            f"{path} does not fit {type(model).__name__}: {reason}", "choose a checkpoint of this model"
        ) from error


@dataclass(frozen=True, slots=True)
class ModelProgram:
    """A model with its inputs and the function that runs one step of it.

    inputs : function that returns a new copy of the inputs of one step, always with the same values
    steps : number of steps, without warm-up; None to take it from the options
    finish : function called after all steps, which returns lines to print
    """

    name: str
    model: nn.Module
    inputs: Callable[[], Any]
    step: Callable[[Any], Any]
    details: Mapping[str, Any] = field(default_factory=dict)
    steps: int | None = None
    finish: Callable[[], Iterable[str]] = tuple


def under_autocast(program: ModelProgram, dtype: str | None) -> ModelProgram:
    """Return a program whose model runs under `torch.autocast` with `dtype`, or the same program without a dtype."""
    if dtype is None:
        return program

    def step(inputs: Any) -> Any:
        with _autocast_in_forward(program.model, dtype):
            return program.step(inputs)

    return replace(program, step=step, details={**program.details, "autocast": dtype})


@contextmanager
def _autocast_in_forward(model: nn.Module, dtype: str) -> Iterator[None]:
    device = next((parameter.device.type for parameter in model.parameters()), "cpu")
    contexts: list[torch.autocast] = []

    def enter(*_: Any) -> None:
        context = torch.autocast(device, dtype=getattr(torch, dtype))
        context.__enter__()
        contexts.append(context)

    def leave(*_: Any) -> None:
        contexts.pop().__exit__(None, None, None)

    # always_call, because autocast must end also if the forward raises
    hooks = (model.register_forward_pre_hook(enter), model.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
