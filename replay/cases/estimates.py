"""What calls cost as far as their signatures show it, for traces without times."""

from __future__ import annotations

from typing import Any

import torch

from opgrip.replay.operators.lookup import Unsupported, find_operator, is_view
from opgrip.replay.operators.memory import bytes_of
from opgrip.replay.operators.work import work_of
from opgrip.traces.schema.arguments import TensorSpec, map_leaves
from opgrip.traces.schema.records import Signature

FLOPS_PER_BYTE = 10
"""Floating-point operations that a machine does while it moves a byte. Accelerators and CPUs do 5 to 200."""


def estimated_cost(signature: Signature) -> float:
    """Return the estimated cost of a call: bytes moved, plus the time of its arithmetic in the same unit.

    The operator is not run; its formulas get tensors on the meta device.
    """
    if is_view(signature):
        return 1.0
    whole = float(bytes_of([signature.args, signature.kwargs, signature.outputs]))
    try:
        args, kwargs, outputs = map_leaves(_without_memory, (signature.args, signature.kwargs, signature.outputs))
        work = work_of(find_operator(signature).function, signature.op, args, kwargs, outputs)
    except (Unsupported, RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError, OverflowError):
        return 1.0 + whole
    moved = whole if work.bytes is None else work.bytes
    return 1.0 + moved + (work.flops or 0) / FLOPS_PER_BYTE


def _without_memory(leaf: Any) -> Any:
    if not isinstance(leaf, TensorSpec):
        return leaf
    if leaf.stride is None or leaf.made_of is not None:
        raise Unsupported("a tensor without strides")
    return torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.dtype, device="meta")
