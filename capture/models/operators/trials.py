"""Tries sample calls where no capture sees them: whether they run, and which operators they call with what."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from opgrip.capture.models.operators.entry import Arguments
from opgrip.capture.signatures.signatures import call_key
from opgrip.capture.torch_compat.compiler_private import OrderlyMode
from opgrip.capture.torch_compat.torch_private import without_functions, without_modes
from opgrip.traces.schema.arguments import leaves

NO_DERIVATIVE = re.compile(r"derivative for .* is not implemented")
"""How torch says that an operator is not differentiable."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What came of a sample call that ran.

    Attributes
    ----------
    calls : keys of the operator calls that it made, each of a signature
    operators : of these
    backward : why its gradients could not be had, empty where they could; None where it has none
    """

    calls: frozenset[Hashable]
    operators: frozenset[Any]
    backward: str | None


class Probe(OrderlyMode):
    """Notes which operators run, and keeps their calls from the modes around it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: set[Hashable] = set()
        self.operators: set[Any] = set()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Note and run one operator."""
        with without_modes(), without_functions():
            self.calls.add(hash(call_key(func, args, kwargs or {})))
            self.operators.add(func)
            return func(*args, **(kwargs or {}))


def try_call(function: Callable[..., Any], arguments: Arguments, with_gradients: bool) -> Trial:
    """Run a call, and its gradients; raises what the call does."""
    probe = Probe()
    with probe:
        result = function(*arguments[0], **arguments[1])
    backward = None
    if with_gradients:
        try:
            with probe:
                backward = None if run_backward(result, arguments) is None else ""
        except Exception as error:
            # an operator without a derivative has none to record
            backward = None if NO_DERIVATIVE.search(str(error)) else f"{type(error).__name__}: {error}"
    return Trial(frozenset(probe.calls), frozenset(probe.operators), backward)


def run_backward(result: Any, arguments: Arguments) -> Any:
    """The gradients of a call's results; None where it has none."""
    outputs = [item for item in tensors_in(result) if item.requires_grad]
    inputs = [item for item in tensors_in(list(arguments)) if item.requires_grad]
    if not outputs or not inputs:
        return None
    with without_modes(), without_functions():
        ones = [torch.ones_like(output) for output in outputs]
    return torch.autograd.grad(outputs, inputs, ones, allow_unused=True)


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors in a tree of arguments or results."""
    return (leaf for leaf in leaves(tree) if isinstance(leaf, torch.Tensor))
