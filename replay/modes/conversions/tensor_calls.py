"""A call as a function of tensors, as exporters and graph compilers need it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from opgrip.replay.modes.mode import RunOutputs, Task
from opgrip.replay.operators.admission import Unsupported
from opgrip.replay.operators.memory import Arguments, tensors_in
from opgrip.traces.schema.arguments import map_leaves


class TensorCall(nn.Module):
    """A call as a module of its tensors; all other arguments are constant.

    Arguments that it writes into are returned after its results.
    in_place : write into the arguments, as the call does; otherwise into copies, for runtimes that cannot
    """

    def __init__(self, task: Task, in_place: bool = False) -> None:
        super().__init__()
        self._function = task.function
        self._mutates = task.mutates
        self._copies = task.mutates and not in_place
        self._args, self._kwargs = task.args, task.kwargs
        self._results = 0

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        inputs = [tensor.clone() for tensor in tensors] if self._copies else list(tensors)
        remaining_inputs = iter(inputs)

        def build(leaf: Any) -> Any:
            return next(remaining_inputs) if isinstance(leaf, Tensor) else leaf

        args, kwargs = map_leaves(build, self._args), map_leaves(build, self._kwargs)
        results = tensors_in(self._function(*args, **kwargs))
        self._results = len(results)
        return (*results, *(inputs if self._mutates else ()))

    def enter(self, arguments: Arguments) -> Arguments:
        return tuple(tensors_in(list(arguments))), {}

    def leave(self, tensors: Sequence[Tensor]) -> RunOutputs:
        return RunOutputs(list(tensors[: self._results]), list(tensors[self._results :]))


def exported(task: Task, in_place: bool = False) -> tuple[torch.export.ExportedProgram, TensorCall]:
    """Export a call by torch.export.

    Raises `Unsupported` if it takes or returns no tensor, or writes into memory that its arguments share.
    """
    call = TensorCall(task, in_place)
    tensors = tensors_in([task.args, task.kwargs])
    if not tensors:
        raise Unsupported("it has no tensor argument, nor a list, tuple or dict with one")
    if task.mutates and len({tensor.untyped_storage()._cdata for tensor in tensors}) < len(tensors):
        raise Unsupported("it writes into memory that its arguments share")
    with torch.no_grad():
        program = torch.export.export(call, tuple(tensors))
        # running the call records how many of the tensors are results
        call(*tensors)
    if not program.graph_signature.user_outputs:
        raise Unsupported("it gives no tensor")
    return program, call
