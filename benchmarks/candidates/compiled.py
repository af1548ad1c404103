"""GELU, compiled by torch.compile for any shape."""

from __future__ import annotations

from math import pi, sqrt

import torch
from torch import Tensor


@torch.compile(dynamic=True)
def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """Return the input multiplied by its normal distribution function; `approximate` is `none` or `tanh`, as in aten.

    Source: Hendrycks and Gimpel 2016, section 2.
    """
    if approximate == "tanh":
        return 0.5 * x * (1 + torch.tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + torch.erf(x * sqrt(0.5)))
