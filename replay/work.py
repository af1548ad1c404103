"""How much a call does: bytes and floating-point operations."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from opgrip.traces.arguments import TensorSpec, tensors
from opgrip.traces.records import Signature


def bytes_of(signature: Signature) -> int:
    """Bytes of all tensors that a call takes and gives, each counted once for each time it is an argument or result.

    Elements that an expanded tensor repeats count once.
    """
    return sum(_bytes(spec) for spec in tensors([signature.args, signature.kwargs, signature.outputs]))


def flops_of(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int | None:
    """Floating-point operations of a call by torch's formulas, a multiply-add being two; None where it has none."""
    if not isinstance(function, torch._ops.OpOverload):
        return None
    formula = flop_registry.get(function._overloadpacket)
    try:
        return None if formula is None else int(formula(*args, **kwargs, out_val=result))
    except Exception:
        # a formula that does not know these arguments is as good as none
        return None


def _bytes(spec: TensorSpec) -> int:
    steps = spec.stride or (1,) * len(spec.shape)
    return prod(size for size, step in zip(spec.shape, steps, strict=True) if step or not size) * spec.dtype.itemsize
