"""Layer norm and softmax of a few operators of torch; autograd computes their gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the normalized input, its mean and the reciprocal of its standard deviation.

    x : (..., *shape)
    weight, bias : (*shape), or None for one and zero
    eps : added to the variance

    Source: Ba et al. 2016, equation 4.
    """
    dims = tuple(range(x.dim() - len(shape), x.dim()))
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    variance, mean = torch.var_mean(wide, dims, correction=0, keepdim=True)
    scale = (variance + eps).rsqrt()
    normal = (wide - mean) * scale
    if weight is not None:
        normal = normal * weight
    if bias is not None:
        normal = normal + bias
    # as the operator, which returns contiguous results for inputs with other strides
    return normal.to(x.dtype).contiguous(), mean, scale


def softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """Return the exponentials of the input divided by their sum over dimension `dim`.

    half_to_float : ignored; the result has the input's dtype
    """
    exponentials = (x - x.amax(dim, keepdim=True)).exp()
    return (exponentials / exponentials.sum(dim, keepdim=True)).contiguous()
