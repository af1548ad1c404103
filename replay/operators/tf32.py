"""Which operators may multiply float32 as TF32, which has its range and ten bits of its fraction."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from opgrip.platform.precisions import allows_tf32

EPS = 2.0**-10
"""What lies between 1 and the next number of TF32."""

ROUNDED = frozenset({torch.float32, torch.complex64})
"""Dtypes whose products it may stand in for."""
KINDS = ("cuda",)
"""Kinds of device that have it."""

_CONVOLUTION = re.compile(r"(^|_)conv(olution)?(_|\d|$)")
_RECURRENT = re.compile(r"(^|_)(rnn|lstm|gru)(_|$)")
_PRODUCT = re.compile(r"^_?(\w*bmm|(add)?mm|matmul|linear|einsum|cdist|bilinear|scaled_dot_product)(_|$)")


class OperatorNames(TorchDispatchMode):
    """Keeps the names of the operators that run, such as `aten.mm`."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func.overloadpacket))
        return func(*args, **(kwargs or {}))


def tf32_places(operators: Iterable[str]) -> set[str]:
    """The settings of torch that say whether operators, such as `aten.mm`, multiply float32 as TF32."""
    names = {name.rpartition(".")[2] for name in operators}
    patterns = {"cudnn.conv": _CONVOLUTION, "cudnn.rnn": _RECURRENT, "cuda.matmul": _PRODUCT}
    return {place for place, pattern in patterns.items() if any(map(pattern.search, names))}


def takes_float32(tensors: Iterable[Tensor]) -> bool:
    """Whether any of these lies where TF32 may stand in for it."""
    return any(tensor.dtype in ROUNDED and tensor.device.type in KINDS for tensor in tensors)


def may_use_tf32(operators: Iterable[str]) -> bool:
    """Whether torch lets any of these operators multiply float32 as TF32."""
    return any(map(allows_tf32, tf32_places(operators)))


def must_use_float32(operators: Iterable[str]) -> bool:
    """Whether torch wants float32 of any of these operators: a runtime with one setting then gives it to all."""
    return not all(map(allows_tf32, tf32_places(operators)))
