"""What some of the admitted versions of torch lack of what tests ask for: each fact stands here once."""

from __future__ import annotations

import torch

REMOVED_OPERATORS = frozenset({"aten.cholesky"})
"""Operators of older versions that newer ones have under another name alone."""


def has_dtype(name: str) -> bool:
    """Whether this torch has a dtype, such as `float4_e2m1fn_x2`, which torch 2.6 has not."""
    return hasattr(torch, name)


def is_removed(operator: str) -> bool:
    """Whether an operator, `aten.cholesky.default` for one, is among those removed, and is not in this torch."""
    namespace, packet = operator.split(".")[:2]
    return f"{namespace}.{packet}" in REMOVED_OPERATORS and not hasattr(getattr(torch.ops, namespace), packet)
