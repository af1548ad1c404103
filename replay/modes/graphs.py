"""A call as a function of tensors alone, which is what exporters and graph compilers take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from opgrip.replay.modes.mode import Results, Task
from opgrip.replay.operators import Unsupported
from opgrip.replay.timing.methods import Arguments
from opgrip.traces.arguments import leaves, map_leaves


class TensorCall(nn.Module):
    """A call that takes its tensors one after the other and gives tensors; all else that it takes is constant.

    It leaves its arguments as they are: where the call writes into them, what it made of them follows its results.
    """

    def __init__(self, task: Task) -> None:
        super().__init__()
        self._function = task.function
        self._mutates = task.mutates
        self._args, self._kwargs = task.args, task.kwargs
        self._results = 0

    def tensors(self, arguments: Arguments) -> list[Tensor]:
        """The tensors in a call's arguments, in the order in which `forward` takes them."""
        return [leaf for leaf in leaves(list(arguments)) if isinstance(leaf, Tensor)]

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Run the call; gives its results, and what it made of its arguments where it writes into them."""
        given = [tensor.clone() for tensor in tensors] if self._mutates else list(tensors)
        left = iter(given)

        def build(leaf: Any) -> Any:
            return next(left) if isinstance(leaf, Tensor) else leaf

        args, kwargs = map_leaves(build, self._args), map_leaves(build, self._kwargs)
        outputs = self._function(*args, **kwargs)
        results = [leaf for leaf in leaves(outputs) if isinstance(leaf, Tensor)]
        self._results = len(results)
        return (*results, *(given if self._mutates else ()))

    def results(self, tensors: Sequence[Tensor]) -> Results:
        """What `forward` gave, or a program that was made of it."""
        return Results(list(tensors[: self._results]), list(tensors[self._results :]))


def exported(task: Task) -> tuple[torch.export.ExportedProgram, TensorCall]:
    """A call as torch.export has it.

    Raises
    ------
    Unsupported : where it takes or gives no tensor, or writes into memory that its arguments share
    """
    call = TensorCall(task)
    tensors = call.tensors((task.args, task.kwargs))
    if not tensors:
        raise Unsupported("it takes no tensor")
    if task.mutates and len({tensor.untyped_storage()._cdata for tensor in tensors}) < len(tensors):
        raise Unsupported("it writes into memory that its arguments share")
    with torch.no_grad():
        program = torch.export.export(call, tuple(tensors))
    if not any(
        isinstance(spec.arg, torch.export.graph_signature.TensorArgument)
        for spec in program.graph_signature.output_specs
    ):
        raise Unsupported("it gives no tensor")
    return program, call
