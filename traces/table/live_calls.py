"""Arguments and results of a trace's calls as live objects."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch

from opgrip.errors import FormatError, UserError, one_line
from opgrip.traces.io.tensor_file import TensorFile, from_stored
from opgrip.traces.rebuild import lay_out, make_arguments
from opgrip.traces.schema.arguments import map_leaves, tensors
from opgrip.traces.schema.tensor_specs import TensorSpec
from opgrip.traces.table.trace import Trace


class LiveArguments:
    """Creates the arguments and results that a trace describes; names in the trace are never imported."""

    def __init__(self, trace: Trace, classes: Mapping[str, Any]) -> None:
        self._trace = trace
        self._classes = classes
        self._files = [TensorFile(path) for path in trace.tensor_files]

    def make(self, tree: Any) -> Any:
        specs = list(tensors(tree))
        try:
            live_tensors = iter(lay_out(specs, self._values, _device))
        except (FormatError, RuntimeError) as error:
            reason = one_line(error)
            raise UserError(f"a tensor of a call cannot be created: {reason}", "grip the function again") from error
        live = map_leaves(lambda leaf: next(live_tensors) if isinstance(leaf, TensorSpec) else leaf, tree)
        return make_arguments(live, self._classes)

    def is_whole(self, spec: TensorSpec) -> bool:
        return 0 in spec.shape or spec.device == "meta" or self._trace.tensors.get(_number(spec)) is not None

    def _values(self, spec: TensorSpec, shape: tuple[int, ...]) -> torch.Tensor:
        key = self._trace.tensors.get(_number(spec))
        if key is None:
            model = self._trace.values.get(_number(spec))
            if model is None:
                return torch.zeros(shape, dtype=spec.dtype)
            return model.draw(shape, spec.dtype, torch.Generator().manual_seed(0))
        for file in self._files:
            if key in file.keys():  # noqa: SIM118 - not a dictionary
                values = from_stored(file.read(key), spec.dtype)
                if values is not None and values.numel() == prod(shape):
                    return values.reshape(shape)
        raise UserError(
            f"the file of values lacks the tensor {key} of a call, of shape {list(spec.shape)}",
            "grip the function again",
        )


def _number(spec: TensorSpec) -> int:
    return -1 if spec.values is None else spec.values


def _device(recorded: str) -> str:
    try:
        torch.empty(0, device=recorded)
    except (RuntimeError, AssertionError, ImportError):
        return "cpu"
    return recorded
