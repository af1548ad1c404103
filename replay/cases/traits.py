"""What operators do with values: which may take any whole numbers, since they check indices or know none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

CHECKED_ON_CPU = frozenset(
    {
        *("index", "index_put", "index_put_", "_index_put_impl_", "index_select", "index_add", "index_add_"),
        *("index_copy", "index_copy_", "index_fill", "index_fill_", "gather", "take", "embedding"),
        *("scatter", "scatter_", "scatter_add", "scatter_add_", "nll_loss_forward"),
    }
)
"""Those that raise on the CPU where an index is none. On an accelerator they would end its use by this process."""

NO_INDICES = frozenset(
    {
        *("cat", "stack", "clone", "_to_copy", "copy_", "copy", "_local_scalar_dense", "contiguous", "equal"),
        *("sort", "topk", "sum", "max", "min", "amax", "amin", "any", "all", "argmax", "argmin", "cumsum", "prod"),
        *("nonzero", "flip", "roll", "repeat", "constant_pad_nd", "detach", "alias", "lift_fresh", "select_backward"),
        *("ones_like", "zeros_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like"),
        *("new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided", "resize_", "tril", "triu"),
        *("fill", "fill_", "zero", "zero_", "masked_fill_", "bernoulli_", "random_", "masked_select"),
    }
)
"""Those that take numbers as numbers, beside views and those that go element by element."""

DIVIDE = frozenset({"div", "div_", "floor_divide", "floor_divide_", "remainder", "remainder_", "fmod", "fmod_"})
"""Those where some numbers are a fault of the processor."""

OVERWRITE = frozenset(
    {"copy_", "fill_", "zero_", "bernoulli_", "normal_", "uniform_", "random_", "exponential_", "geometric_", "cauchy_"}
)
"""Those that do not read what they write into: it may never have had values."""


def overwrites(function: Callable[..., Any]) -> bool:
    """Whether an operator's first argument is what it writes, whatever that was before."""
    return _name_of(function) in OVERWRITE


def sizes_vary(function: Callable[..., Any]) -> bool:
    """Whether the shapes of an operator's results may depend on values."""
    return _name_of(function) is None or torch.Tag.dynamic_output_shape in getattr(function, "tags", ())


def takes_any_numbers(function: Callable[..., Any], device: str) -> bool:
    """Whether an operator does no harm, whatever whole numbers it is given on this device."""
    name = _name_of(function)
    if name is None:
        return False
    if name in NO_INDICES or getattr(function, "is_view", False):
        return True
    if torch.Tag.pointwise in getattr(function, "tags", ()):
        return name not in DIVIDE
    return name in CHECKED_ON_CPU and torch.device(device).type == "cpu"


def _name_of(function: Callable[..., Any]) -> str | None:
    """The name of one of torch's own operators."""
    if not isinstance(function, torch._ops.OpOverload) or function.namespace != "aten":
        return None
    return str(function._schema.name).partition("::")[2]
