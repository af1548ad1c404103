"""The backward of one call: the graph is made anew for every run, outside of its time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from opgrip.replay.arguments.inputs import Inputs
from opgrip.replay.operators import Operator, Unsupported
from opgrip.replay.timing.methods import Arguments
from opgrip.traces.arguments import leaves


def backward_of(operator: Operator, inputs: Inputs) -> tuple[Callable[..., Any], Callable[[Arguments], Arguments]]:
    """What computes the gradients of a call, and what makes its arguments of those of the call.

    Parameters
    ----------
    inputs : of the call; those tensors that the program had gradients for require them

    Raises
    ------
    Unsupported : where the call has no gradients
    """
    if operator.mutates:
        raise Unsupported("a call that writes into its arguments has no backward of its own")
    args, kwargs = inputs.make()
    if not _wanting([args, kwargs]):
        raise Unsupported("none of its arguments required a gradient")
    if not _with_graph(operator.function(*args, **kwargs)):
        raise Unsupported("its results have no gradient")

    def prepare(arguments: Arguments) -> Arguments:
        args, kwargs = arguments
        outputs = _with_graph(operator.function(*args, **kwargs))
        return (outputs, _wanting([args, kwargs]), [torch.ones_like(output) for output in outputs]), {}

    return _gradients, prepare


def _gradients(outputs: list[torch.Tensor], wanting: list[torch.Tensor], given: list[torch.Tensor]) -> Any:
    return torch.autograd.grad(outputs, wanting, given, allow_unused=True)


def _wanting(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


def _with_graph(outputs: Any) -> list[torch.Tensor]:
    return [leaf for leaf in leaves(outputs) if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None]
