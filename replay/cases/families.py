"""What kind of work an operator does, by its name."""

from __future__ import annotations

import re

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
"""Families, and what the names of their operators have in them; the first that matches counts."""
_COMPILED = tuple((family, re.compile(pattern)) for family, pattern in FAMILIES)


def family_of(op: str) -> str:
    """The family of an operator: `aten.convolution_backward.default` is a convolution.

    Functions of extension modules are a family of their own, and what is no operator but a function or a module too.
    """
    if ":" in op:
        return EXTENSION
    namespace, _, rest = op.partition(".")
    if namespace not in ("aten", "prims") or not rest:
        return LONG_TAIL if namespace not in ("torchvision", "mmcv", "quantized") else EXTENSION
    name = rest.partition(".")[0].removesuffix("_backward")
    return next((family for family, pattern in _COMPILED if pattern.search(name)), OTHER)
