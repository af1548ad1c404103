"""SiLU registered through torch.library, with its gradient.

The operator belongs to its own namespace: a kernel registered for `aten::silu` would replace the operator that it is
compared with.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("opgrip_examples::silu", mutates_args=())
def silu(x: Tensor) -> Tensor:
    """Return the input multiplied by its logistic function."""
    return torch.sigmoid(x).mul_(x)


def _keep(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradient(ctx: Any, gradient: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    logistic = torch.sigmoid(x)
    return gradient * logistic * (1 + x * (1 - logistic))


silu.register_autograd(_gradient, setup_context=_keep)
