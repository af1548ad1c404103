"""Small calls of many operators and functions, for tests of correctness."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Function = Callable[..., Any]


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


X, Y, Z = drawn(64, 100), drawn(64, 100, seed=1), drawn(100, 48, seed=2)
IMAGE, KERNEL = drawn(2, 8, 16, 16), drawn(12, 8, 3, 3, seed=3)
HALF, SMALL = X.half(), X.bfloat16()
WHOLE = torch.arange(64 * 100).reshape(64, 100) % 37
C = torch.complex(X, Y)
aten = torch.ops.aten

CALLS: dict[str, tuple[Function, tuple[Any, ...]]] = {
    "add": (aten.add.Tensor, (X, Y)),
    "mul_half": (aten.mul.Tensor, (HALF, HALF)),
    "div": (aten.div.Tensor, (X, Y)),
    "div_floor": (aten.div.Tensor_mode, (X, Y)),
    "exp": (aten.exp.default, (X * 10,)),
    "log": (aten.log.default, (X,)),
    "sqrt": (aten.sqrt.default, (X,)),
    "sigmoid": (aten.sigmoid.default, (SMALL,)),
    "gelu": (aten.gelu.default, (SMALL,)),
    "gelu_float": (aten.gelu.default, (X,)),
    "silu": (aten.silu.default, (HALF,)),
    "tanh": (aten.tanh.default, (X,)),
    "hardswish": (aten.hardswish.default, (X,)),
    "leaky_relu": (aten.leaky_relu.default, (X,)),
    "clamp": (aten.clamp.default, (X, -1.0, 1.0)),
    "where": (aten.where.self, (X > 0, X, Y)),
    "addcmul": (aten.addcmul.default, (X, X, Y)),
    "lerp": (aten.lerp.Scalar, (X, Y, 0.3)),
    "softmax": (aten._softmax.default, (X, -1, False)),
    "softmax_bfloat16": (aten._softmax.default, (SMALL, -1, False)),
    "log_softmax": (aten._log_softmax.default, (X * 20, -1, False)),
    "layer_norm": (aten.native_layer_norm.default, (X, [100], None, None, 1e-5)),
    "layer_norm_half": (aten.native_layer_norm.default, (HALF, [100], None, None, 1e-5)),
    "batch_norm": (aten.native_batch_norm.default, (IMAGE, None, None, None, None, True, 0.1, 1e-5)),
    "group_norm": (aten.native_group_norm.default, (IMAGE, None, None, 2, 8, 256, 4, 1e-5)),
    "var_mean": (aten.var_mean.correction, (X + 100, [1])),
    "std": (aten.std.correction, (X, [0])),
    "sum": (aten.sum.dim_IntList, (X, [1])),
    "sum_half": (aten.sum.dim_IntList, (HALF, [1])),
    "mean": (aten.mean.default, (X,)),
    "cumsum": (aten.cumsum.default, (X, 1)),
    "prod": (aten.prod.dim_int, (X, 1)),
    "amax": (aten.amax.default, (X, [1])),
    "norm": (aten.linalg_vector_norm.default, (X, 2.0, [1])),
    "logsumexp": (aten.logsumexp.default, (X * 30, [1])),
    "mm": (aten.mm.default, (X, Z)),
    "mm_bfloat16": (aten.mm.default, (SMALL, Z.bfloat16())),
    "addmm": (aten.addmm.default, (torch.ones(48), X, Z)),
    "bmm": (aten.bmm.default, (X.reshape(4, 16, 100), X.reshape(4, 100, 16))),
    "conv": (aten.convolution.default, (IMAGE, KERNEL, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)),
    "max_pool": (aten.max_pool2d_with_indices.default, (IMAGE, [3, 3], [2, 2], [1, 1])),
    "avg_pool": (aten.avg_pool2d.default, (IMAGE, [3, 3], [2, 2])),
    "upsample": (aten.upsample_bilinear2d.vec, (IMAGE, [31, 29], False, None)),
    "upsample_nearest": (aten.upsample_nearest2d.vec, (IMAGE, [31, 29], None)),
    "grid_sample": (aten.grid_sampler_2d.default, (IMAGE, X[:40].reshape(2, 10, 100, 2), 0, 0, False)),
    "sort": (aten.sort.default, (WHOLE, 1)),
    "topk": (aten.topk.default, (WHOLE, 7, 1)),
    "max": (aten.max.dim, (WHOLE, 1)),
    "argmax": (aten.argmax.default, (WHOLE,)),
    "gather": (aten.gather.default, (X, 1, WHOLE)),
    "index": (aten.index.Tensor, (X, [WHOLE[0], WHOLE[1]])),
    "index_add": (aten.index_add.default, (X, 0, WHOLE[0], drawn(100, 100))),
    "embedding": (aten.embedding.default, (X, WHOLE)),
    "cat": (aten.cat.default, ([X, Y], 1)),
    "split": (aten.split.Tensor, (X, 30)),
    "nonzero": (aten.nonzero.default, (WHOLE > 30,)),
    "eq": (aten.eq.Tensor, (WHOLE, WHOLE.t().reshape(64, 100))),
    "complex_mul": (aten.mul.Tensor, (C, C)),
    "fft": (aten._fft_c2c.default, (C, [1], 0, True)),
    "roll": (aten.roll.default, (X, [3], [1])),
    "cross_entropy": (F.cross_entropy, (X, WHOLE[:, 0])),
    "smooth_l1": (F.smooth_l1_loss, (X, Y)),
    "attention": (F.scaled_dot_product_attention, tuple(IMAGE[None] for _ in range(3))),
    "ratio": (lambda a, b: (a - b).clamp(min=0).sum(-1) / ((a + b).abs().sum(-1) + 1e-6), (X, Y)),
    "normalize": (lambda a: (a - a.mean()) / a.std(), (X,)),
}
KEYWORDS: dict[str, dict[str, Any]] = {
    "div_floor": {"rounding_mode": "floor"},
    "gelu": {"approximate": "tanh"},
    "gelu_float": {"approximate": "tanh"},
    "var_mean": {"correction": 1},
    "std": {"correction": 1},
}
