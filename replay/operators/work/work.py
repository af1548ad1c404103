"""The work of a call: its arithmetic, the bytes that it has to move, the operators that it runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from opgrip.replay.operators.work.calls import Call, call_of
from opgrip.replay.operators.work.formulas import flops_of
from opgrip.replay.operators.work.traffic import bytes_moved
from opgrip.traces.schema.torch_names import plain_name

NARROW_PRODUCTS = ("aten._scaled_mm", "aten._int_mm")
"""Multiply in 8 bits and give wider numbers."""


@dataclass(frozen=True, slots=True)
class Work:
    """What one call has to do at least.

    Attributes
    ----------
    flops : floating-point operations; None where there is no formula
    bytes : to move; None where that is not known
    dtype : that it computes in, `float32`; None where nothing tells
    operators : that it runs, as torch dispatches them
    """

    flops: int | None
    bytes: int | None
    dtype: str | None
    operators: int


def work_of(
    function: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> Work:
    """The work of a call that gave this.

    Parameters
    ----------
    name : of a function that is no operator of torch
    """
    return _work(call_of(function, name, args, kwargs, result))


def counted(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], whole: bool = True) -> Work:
    """The work of a function that runs operators, by running it once.

    Its operations are those of its operators, as far as they are known.

    Parameters
    ----------
    whole : its bytes are those of arguments and results, as if it were one kernel; else those of each operator
    """
    tally = _Tally()
    with tally:
        result = function(*args, **kwargs)
    size = bytes_moved(call_of(function, "", args, kwargs, result)) if whole else tally.bytes
    dtype = max(tally.by_dtype, key=lambda name: tally.by_dtype[name], default=None)
    return Work(tally.flops if tally.has_flops else None, size, dtype, tally.operators)


class _Tally(TorchDispatchMode):
    """Adds up the work of the operators that run under it."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = self.bytes = self.operators = 0
        self.has_flops = False
        self.by_dtype: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and count it."""
        result = function(*args, **(kwargs or {}))
        work = work_of(function, str(function), tuple(args), kwargs or {}, result)
        self.operators += 1
        self.has_flops |= work.flops is not None
        self.flops += work.flops or 0
        self.bytes += work.bytes or 0
        if work.dtype is not None:
            self.by_dtype[work.dtype] += work.flops or 0
        return result


def _work(call: Call) -> Work:
    return Work(flops_of(call), bytes_moved(call), _dtype(call), 1)


def _dtype(call: Call) -> str | None:
    """The dtype of the largest floating-point tensor, or else of the largest tensor; of narrow products their own."""
    if call.name in NARROW_PRODUCTS:
        return plain_name(call.values["self"].dtype)
    tensors: list[torch.Tensor] = sorted(
        (*call.ins, *call.outs), key=lambda tensor: (tensor.is_floating_point() or tensor.is_complex(), tensor.numel())
    )
    return plain_name(tensors[-1].dtype) if tensors else None
