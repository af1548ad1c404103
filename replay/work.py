"""How much a call does: bytes and floating-point operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from opgrip.traces.arguments import tensors
from opgrip.traces.records import Signature
from opgrip.traces.tensor_specs import stored_elements


def bytes_of(signature: Signature) -> int:
    """Bytes of all tensors that a call takes and gives, each counted once for each time it is an argument or result.

    Elements that an expanded tensor repeats count once.
    """
    specs = tensors([signature.args, signature.kwargs, signature.outputs])
    return sum(stored_elements(spec) * spec.dtype.itemsize for spec in specs)


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
