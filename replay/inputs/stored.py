"""The values themselves, of a trace that was captured with them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

import torch

from opgrip.errors import UserError
from opgrip.traces import Trace
from opgrip.traces.io.tensor_file import TensorFile, from_stored
from opgrip.traces.schema.arguments import TensorSpec
from opgrip.traces.values import Drawable, ValueModel


@dataclass(frozen=True, slots=True)
class Stored:
    """Draws what the program had, and where that cannot be had, what the value model gives.

    Attributes
    ----------
    model : stands in for values that do not fit
    repeated : the tensor's dimensions of stride 0, which the file holds once
    """

    model: ValueModel
    file: TensorFile
    key: str
    repeated: tuple[int, ...] = ()

    def laid_out(self, spec: TensorSpec) -> Stored:
        """The same for a tensor of that layout."""
        repeated = tuple(dimension for dimension, step in enumerate(spec.stride or ()) if step == 0)
        return replace(self, repeated=repeated) if repeated else self

    def draw(self, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        """The values, on the generator's device; those of repeated dimensions share memory."""
        values = self._fitting(shape, dtype)
        if values is None:
            return self.model.draw(shape, dtype, generator)
        return values.to(generator.device).expand(shape)

    def fits(self, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        """Whether the values themselves are drawn for a tensor of that shape."""
        return self._fitting(shape, dtype) is not None

    def _fitting(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        once = [1 if dimension in self.repeated else size for dimension, size in enumerate(shape)]
        values = self._read(dtype)
        return None if values is None or values.numel() != prod(once) else values.reshape(once)

    def _read(self, dtype: torch.dtype) -> torch.Tensor | None:
        try:
            return from_stored(self.file.read(self.key), dtype)
        except UserError:
            return None


def drawn_values(trace: Trace) -> Mapping[int, Drawable]:
    """By number, what a trace's values are drawn from: the values themselves as far as they are there, else models.

    Warns where some are not.
    """
    if not trace.tensors:
        return trace.values
    file_of: dict[str, TensorFile] = {}
    reasons = [] if trace.tensor_files else ["their file is not beside the trace"]
    for path in trace.tensor_files:
        file = TensorFile(path)
        try:
            file_of |= dict.fromkeys(file.keys(), file)
        except UserError as error:
            reasons.append(str(error))
    stored_keys = {number: key for number, key in trace.tensors.items() if key in file_of and number in trace.values}
    if lacking := len(trace.tensors) - len(stored_keys):
        reason = "; ".join(reasons) or "the file beside the trace does not hold them"
        warnings.warn(
            f"{lacking:,} of {len(trace.tensors):,} whole values are drawn from models: {reason}",
            RuntimeWarning,
            stacklevel=3,
        )
    stored = {number: Stored(trace.values[number], file_of[key], key) for number, key in stored_keys.items()}
    return {**trace.values, **stored}
