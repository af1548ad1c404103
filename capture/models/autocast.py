"""Runs a program's model in mixed precision."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from opgrip.capture.models.program import Program

if TYPE_CHECKING:
    from torch import nn


def under_autocast(program: Program, dtype: str | None) -> Program:
    """The program whose model runs under `torch.autocast` of its device.

    What a step does beside the calls of its model, as the backward pass and the optimizer, is outside of it: this is
    how torch asks for it.

    Parameters
    ----------
    dtype : `bfloat16` or `float16`; None for the program as it is
    """
    if dtype is None:
        return program

    def step(inputs: Any) -> Any:
        with _autocast_in_forward(program.model, dtype):
            return program.step(inputs)

    return replace(program, step=step, details={**program.details, "autocast": dtype})


@contextmanager
def _autocast_in_forward(model: nn.Module, dtype: str) -> Iterator[None]:
    """While it lasts, calls of the module run under autocast."""
    import torch

    device = next((parameter.device.type for parameter in model.parameters()), "cpu")
    contexts: list[torch.autocast] = []

    def enter(*_: Any) -> None:
        context = torch.autocast(device, dtype=getattr(torch, dtype))
        context.__enter__()
        contexts.append(context)

    def leave(*_: Any) -> None:
        contexts.pop().__exit__(None, None, None)

    # always_call: autocast has to end also where the forward raises
    hooks = (model.register_forward_pre_hook(enter), model.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
