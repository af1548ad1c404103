"""Features that some of the supported torch versions lack, and an independent count of operators."""

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))  # installed version, such as `(2, 13)`

# Operators of older versions that newer ones have only under another name.
REMOVED_OPERATORS = frozenset({"aten.cholesky"})


class Counting(TorchDispatchMode):
    """Counter of operators, which shares no code with the recorder that it checks."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def has_detached_views() -> bool:
    """Return True if a view as another dtype shows an additional `detach` to the outer of two nested dispatch modes.

    This happens with torch 2.6.
    """
    x, outer, inner = torch.ones(2), Counting(), Counting()
    with outer, inner:
        x.view(torch.int16)
    return outer.counts.total() > inner.counts.total()


def is_removed(operator: str) -> bool:
    namespace, packet = operator.split(".")[:2]
    return f"{namespace}.{packet}" in REMOVED_OPERATORS and not hasattr(getattr(torch.ops, namespace), packet)
