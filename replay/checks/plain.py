"""Results as dense values on the CPU, and which result of a mode matches which of eager."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor

from opgrip.replay.modes.mode import Results
from opgrip.traces.schema.tensor_specs import QUANTIZED, memory_dtype


@dataclass(frozen=True, slots=True)
class ResultPosition:
    """The position of a result: which output, or which written argument."""

    kind: Literal["output", "argument"]
    number: int

    def of(self, results: Results) -> Any:
        leaves = results.outputs if self.kind == "output" else results.arguments
        return leaves[self.number] if self.number < len(leaves) else None

    def __str__(self) -> str:
        return f"{self.kind} {self.number}"


class Unpaired(Exception):
    """Results that cannot be compared one by one with the reference's. The message is the reason."""


def paired(actual: Results, reference: Results) -> list[tuple[ResultPosition, Any]]:
    """Pair a mode's results with the reference's; raise `Unpaired` if one has more than the other.

    If a mode returns tensors only, only the reference's tensors count.
    """
    if len(actual.outputs) == len(reference.outputs):
        outputs = list(range(len(reference.outputs)))
        ours: Sequence[Any] = actual.outputs
    else:
        outputs = [number for number, leaf in enumerate(reference.outputs) if isinstance(leaf, Tensor)]
        ours = [leaf for leaf in actual.outputs if isinstance(leaf, Tensor)]
        if len(ours) != len(outputs):
            raise Unpaired(f"{len(ours)} tensors as outputs, not {len(outputs)}")
    if len(actual.arguments) != len(reference.arguments):
        raise Unpaired(f"{len(actual.arguments)} written arguments, not {len(reference.arguments)}")
    pairs = [(ResultPosition("output", number), leaf) for number, leaf in zip(outputs, ours, strict=True)]
    return pairs + [(ResultPosition("argument", number), leaf) for number, leaf in enumerate(actual.arguments)]


def within(shape: Sequence[Any], run_shapes: Sequence[Sequence[Any]], *, beyond: bool = False) -> bool:
    """Return True if a shape is one that runs may give, which gave different shapes.

    beyond : allow sizes outside of those seen, in the dimensions that vary
    """
    if any(len(other) != len(shape) for other in run_shapes):
        return len(set(map(len, run_shapes))) > 1 and len(shape) in set(map(len, run_shapes))
    if not all(isinstance(size, int) for one in (shape, *run_shapes) for size in one):
        return False
    ranges = [(min(sizes), max(sizes)) for sizes in zip(*run_shapes, strict=True)]
    if all(least == most for least, most in ranges):
        return False
    return all(
        least <= size <= most or (beyond and least < most) for size, (least, most) in zip(shape, ranges, strict=True)
    )


Shape = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Plain:
    """The values of a tensor or number.

    shape : sizes; of a nested tensor the sizes of each of its tensors
    dtype : of the result; a Python float has float32, its dtype before it left its tensor in most cases
    values : (elements,) float64, complex128, int64 or bool
    step : (elements,) float64, distance of neighbouring values of a quantized dtype; else None
    """

    shape: Shape
    dtype: torch.dtype
    values: Tensor
    step: Tensor | None = None

    @property
    def numeric(self) -> bool:
        return self.values.is_floating_point() or self.values.is_complex()

    def place(self, element: int) -> list[int]:
        """Return the indices of an element; for a nested tensor only its number."""
        if not all(isinstance(size, int) for size in self.shape):
            return [element]
        indices = []
        for size in reversed(self.shape):
            element, index = divmod(element, size)
            indices.append(index)
        return indices[::-1]


def plain(leaf: Any) -> Plain | None:
    """Return a result's values, or None if it is neither a tensor nor a number.

    Raises RuntimeError or NotImplementedError for a tensor that torch cannot make dense.
    """
    if isinstance(leaf, Tensor):
        return _plain_tensor(leaf.detach())
    if isinstance(leaf, bool):
        return Plain((), torch.bool, torch.tensor([leaf]))
    if isinstance(leaf, int) and abs(leaf) < 1 << 63:
        return Plain((), torch.int64, torch.tensor([leaf]))
    if isinstance(leaf, float):
        return Plain((), torch.float32, torch.tensor([leaf], dtype=torch.float64))
    if isinstance(leaf, complex):
        return Plain((), torch.complex64, torch.tensor([leaf], dtype=torch.complex128))
    return None


def _plain_tensor(tensor: Tensor) -> Plain:
    if tensor.is_nested:
        parts = [_plain_tensor(part) for part in tensor.unbind()]
        values = torch.cat([part.values for part in parts]) if parts else torch.empty(0, dtype=torch.float64)
        return Plain(tuple(part.shape for part in parts), tensor.dtype, values)
    shape, dtype = tuple(tensor.shape), tensor.dtype
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    tensor = tensor.cpu()
    if dtype in QUANTIZED:
        return Plain(shape, dtype, tensor.dequantize().double().flatten(), _steps(tensor).flatten())
    return Plain(shape, dtype, _widest(tensor.resolve_conj().resolve_neg()).flatten())


def _widest(tensor: Tensor) -> Tensor:
    dtype = tensor.dtype
    if dtype.is_complex:
        return tensor.to(torch.complex128)
    if memory_dtype(dtype) is not dtype:
        # bits mean nothing by themselves, but the same are the same
        return tensor.contiguous().view(memory_dtype(dtype)).long()
    if dtype.is_floating_point:
        # some small floats only convert to float32
        return tensor.float().double() if dtype.itemsize == 1 else tensor.double()
    if dtype is torch.uint64:
        return tensor.contiguous().view(torch.int64)
    return tensor if dtype is torch.bool else tensor.long()


def _steps(tensor: Tensor) -> Tensor:
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return torch.full((prod(tensor.shape),), tensor.q_scale(), dtype=torch.float64)
    axis = tensor.q_per_channel_axis()
    sizes = [-1 if place == axis else 1 for place in range(tensor.dim())]
    return tensor.q_per_channel_scales().double().reshape(sizes).expand(tensor.shape)
