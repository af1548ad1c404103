"""What some of the admitted versions of torch lack of what tests ask for: each fact stands here once."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
"""Such as `(2, 13)`."""

REMOVED_OPERATORS = frozenset({"aten.cholesky"})
"""Operators of older versions that newer ones have under another name alone."""


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def has_detached_views() -> bool:
    """Whether a mode within another one makes the outer one see a `detach` after a view as another dtype.

    Torch 2.6 does so.
    """
    x, outer, inner = torch.ones(2), _Counter(), _Counter()
    with outer, inner:
        x.view(torch.int16)
    return outer.calls > inner.calls


def tells_reductions() -> bool:
    """Whether a collective's call tells which reduction it does, as torch 2.6 does not."""
    return hasattr(torch.classes.c10d.ReduceOp(), "op")


def has_dtype(name: str) -> bool:
    """Whether this torch has a dtype, such as `float4_e2m1fn_x2`, which torch 2.6 has not."""
    return hasattr(torch, name)


def is_removed(operator: str) -> bool:
    """Whether an operator, `aten.cholesky.default` for one, is among those removed, and is not in this torch."""
    namespace, packet = operator.split(".")[:2]
    return f"{namespace}.{packet}" in REMOVED_OPERATORS and not hasattr(getattr(torch.ops, namespace), packet)


def leaves_compiled_code_under_modes() -> bool:
    """Whether a compiled region is not compiled anew at each call under a mode, as torch 2.6 does."""
    return hasattr(TorchDispatchMode, "ignore_compile_internals")
