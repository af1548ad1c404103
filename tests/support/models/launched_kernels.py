"""Triton kernels that tests launch, in a module as programs have it; TRITON_INTERPRET=1 runs them on the CPU."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, scale, BLOCK: tl.constexpr, OUT: tl.constexpr = tl.float32):  # type: ignore[no-untyped-def]
    """Compute out = x + scale * y in blocks of BLOCK elements."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    total = tl.load(x_ptr + offsets, mask=mask) + scale * tl.load(y_ptr + offsets, mask=mask)
    tl.store(out_ptr + offsets, total.to(OUT), mask=mask)


def time_of_launches(launch: Any, quantiles: Any) -> list[float]:
    """Launch a kernel once, and return as its time at each quantile half of the time returned before."""
    launch()
    times.append(times[-1] / 2)
    return [times[-1]] * len(quantiles)


times = [1.0]


@triton.autotune(
    configs=[triton.Config({"BLOCK": 16}, num_warps=1), triton.Config({"BLOCK": 32}, num_warps=2)],
    key=["n"],
    do_bench=time_of_launches,
)
@triton.heuristics({"EVEN": lambda args: args["n"] % 2 == 0})
@triton.jit
def count_kernel(out_ptr, n, EVEN: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write 0, 1, 2... if n is even, else 1, 2, 3..."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offsets, offsets + (0 if EVEN else 1), mask=offsets < n)


grids = 0


def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    def grid(meta: Any) -> tuple[int]:
        global grids
        grids += 1
        return (triton.cdiv(x.numel(), meta["BLOCK"]),)

    out = torch.empty_like(x)
    add_kernel[grid](x, y, out, x.numel(), 2.0, BLOCK=32, num_warps=2)
    return out


def count(n: int) -> torch.Tensor:
    out = torch.zeros(n)
    count_kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](out, n)
    return out


@triton_op("launched_kernels::plus", mutates_args={})
def plus(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    wrap_triton(add_kernel)[(triton.cdiv(out.numel(), 32),)](x, y, out, out.numel(), 1.0, BLOCK=32)
    return out
