"""Features that some of the supported torch versions lack, each declared once."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))  # installed version, such as `(2, 13)`

# Operators of older versions that newer ones have only under another name.
REMOVED_OPERATORS = frozenset({"aten.cholesky"})


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def has_detached_views() -> bool:
    """Return True if a view as another dtype shows an additional `detach` to the outer of two nested dispatch modes.

    This happens with torch 2.6.
    """
    x, outer, inner = torch.ones(2), _Counter(), _Counter()
    with outer, inner:
        x.view(torch.int16)
    return outer.calls > inner.calls


def shows_reductions() -> bool:
    """Return True if a collective's call shows its reduction; with torch 2.6 it does not."""
    return hasattr(torch.classes.c10d.ReduceOp(), "op")


def has_dtype(name: str) -> bool:
    """Return True if torch has a dtype, such as `float4_e2m1fn_x2`, which torch 2.6 lacks."""
    return hasattr(torch, name)


def is_removed(operator: str) -> bool:
    namespace, packet = operator.split(".")[:2]
    return f"{namespace}.{packet}" in REMOVED_OPERATORS and not hasattr(getattr(torch.ops, namespace), packet)


def leaves_compiled_code_under_modes() -> bool:
    """Return True if a compiled region under a mode is compiled once; torch 2.6 compiles it at each call."""
    return hasattr(TorchDispatchMode, "ignore_compile_internals")
