"""How operators use values, and the family of an operator."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

OTHER, EXTENSION, LONG_TAIL = "other", "extension", "long tail"

FAMILIES: tuple[tuple[str, str], ...] = (
    ("attention", r"attention|sdpa|flash"),
    ("resampling", r"upsample|interpolate|grid_sampl|affine_grid|pixel_(un)?shuffle|roi_|pad"),
    ("convolution", r"conv(?!ert)"),
    ("matrix product", r"^_?(scaled_|int_|ba?dd|add?b?|b)?(mm|mv)(_|$)|matmul|linear|^v?dot$|outer|einsum|^addr$"),
    ("normalization", r"norm(?!al)"),
    ("pooling", r"pool"),
    ("loss", r"loss|cross_entropy|kl_div"),
    ("softmax", r"softmax|logsumexp"),
    ("activation", r"relu|gelu|silu|sigmoid|tanh|elu|hardswish|hardtanh|mish|softplus|leaky|threshold|glu|dropout"),
    ("random", r"rand|bernoulli|normal_?$|multinomial|uniform|exponential|poisson"),
    ("sorting", r"sort|topk|unique|kthvalue|searchsorted|bucketize|nms|histc|bincount|msort"),
    ("indexing", r"index|gather|scatter|embedding|nonzero|where|take|masked|put|one_hot"),
    ("optimizer", r"_fused_|_foreach_|_amp_"),
    ("memory", r"copy|clone|cat|stack|contiguous|empty|zeros|ones|full|fill|zero_|arange|linspace|eye|tril|triu|repeat|"
     r"roll|flip|_to_copy|new_|lift|resize|constant_pad|tri[lu]_indices|meshgrid|split|unfold|im2col|col2im"),
    ("view", r"view|reshape|permute|transpose|squeeze|expand|select|slice|detach|alias|as_strided|unbind|^t$|chunk|"
     r"diagonal|narrow|flatten|real|imag"),
    ("reduction", r"sum|mean|^(arg)?(max|min)$|amax|amin|any|all$|prod|var|std|cum|norm|count|median|mode"),
    ("elementwise", r""),
)  # fmt: skip
"""Families, and patterns of their operators' names. The first match counts."""
_COMPILED = tuple((family, re.compile(pattern)) for family, pattern in FAMILIES)


def family_of(op: str) -> str:
    """Return the family of an operator: convolution for `aten.convolution_backward.default`.

    Functions of extension modules are a family, and so are Python functions and modules.
    """
    if ":" in op:
        return EXTENSION
    namespace, _, rest = op.partition(".")
    if namespace not in ("aten", "prims") or not rest:
        return LONG_TAIL if namespace not in ("torchvision", "mmcv", "quantized") else EXTENSION
    name = rest.partition(".")[0].removesuffix("_backward")
    return next((family for family, pattern in _COMPILED if pattern.search(name)), OTHER)


CHECKED_ON_CPU = frozenset(
    {
        *("index", "index_put", "index_put_", "_index_put_impl_", "index_select", "index_add", "index_add_"),
        *("index_copy", "index_copy_", "index_fill", "index_fill_", "gather", "take", "embedding"),
        *("scatter", "scatter_", "scatter_add", "scatter_add_", "nll_loss_forward"),
    }
)
"""Operators that raise for invalid indices on the CPU. On an accelerator these make the device unusable."""

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
"""Operators that do not use integers as indices, besides views and pointwise ones."""

DIVIDE = frozenset({"div", "div_", "floor_divide", "floor_divide_", "remainder", "remainder_", "fmod", "fmod_"})
"""Operators that crash for some integers."""

OVERWRITE = frozenset(
    {"copy_", "fill_", "zero_", "bernoulli_", "normal_", "uniform_", "random_", "exponential_", "geometric_", "cauchy_"}
)
"""Operators that overwrite their first argument."""


def overwrites(function: Callable[..., Any]) -> bool:
    """Return True if an operator writes its first argument without reading it."""
    return _name_of(function) in OVERWRITE


def sizes_vary(function: Callable[..., Any]) -> bool:
    """Return True if the shapes of results may depend on values."""
    return _name_of(function) is None or torch.Tag.dynamic_output_shape in getattr(function, "tags", ())


def takes_any_numbers(function: Callable[..., Any], device: str) -> bool:
    """Return True if an operator is safe with any integers on this device."""
    name = _name_of(function)
    if name is None:
        return False
    if name in NO_INDICES or getattr(function, "is_view", False):
        return True
    if torch.Tag.pointwise in getattr(function, "tags", ()):
        return name not in DIVIDE
    return name in CHECKED_ON_CPU and torch.device(device).type == "cpu"


def _name_of(function: Callable[..., Any]) -> str | None:
    if not isinstance(function, torch._ops.OpOverload) or function.namespace != "aten":
        return None
    return str(function._schema.name).partition("::")[2]
