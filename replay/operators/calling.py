"""What a call takes, and the tensors in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from opgrip.traces.schema.arguments import leaves

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""By position, and by name."""
Function = Callable[..., Any]


def tensors_in(tree: Any) -> list[Tensor]:
    """All tensors in lists, tuples and dicts, in their order."""
    return [leaf for leaf in leaves(tree) if isinstance(leaf, Tensor)]
