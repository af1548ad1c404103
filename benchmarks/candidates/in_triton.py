"""Sigmoid as a Triton kernel, which Triton's interpreter runs on the CPU."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1 << 16


@triton.jit
def sigmoid_kernel(source, target, count, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write the logistic function of the `count` elements of `source` to `target`, in blocks of `block` elements."""
    places = tl.program_id(0) * block + tl.arange(0, block)
    inside = places < count
    values = tl.load(source + places, mask=inside).to(tl.float32)
    tl.store(target + places, 1 / (1 + tl.exp(-values)), mask=inside)


def sigmoid(x: Tensor) -> Tensor:
    """Return the logistic function of each element."""
    result = torch.empty_like(x)
    # the kernel reads memory in order, which must be that of the result
    source = x if x.stride() == result.stride() else torch.empty_like(result).copy_(x)
    if x.numel():
        sigmoid_kernel[(triton.cdiv(x.numel(), BLOCK),)](source, result, x.numel(), BLOCK)
    return result
