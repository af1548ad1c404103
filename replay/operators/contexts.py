"""The torch settings under which a case ran in the program, and the operators that may use TF32 under them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from opgrip.platform.precisions import (
    CUDA_FLAGS,
    HOST_FLAGS,
    allows_tf32,
    flag_reader,
    flag_text,
    flushes_denormals,
    parse_precisions,
    read_precision,
    set_precision,
    write_flag,
)
from opgrip.traces.schema.arguments import DTYPES

EPS = 2.0**-10  # distance between 1 and the next larger TF32 number

ROUNDED = frozenset({torch.float32, torch.complex64})
KINDS = ("cuda",)  # device types that have TF32

_CONVOLUTION = re.compile(r"(^|_)conv(olution)?(_|\d|$)")
_RECURRENT = re.compile(r"(^|_)(rnn|lstm|gru)(_|$)")
_PRODUCT = re.compile(r"^_?(\w*bmm|(add)?mm|matmul|linear|einsum|cdist|bilinear|scaled_dot_product)(_|$)")


class OperatorNames(TorchDispatchMode):
    """A dispatch mode that collects the names, such as `aten.mm`, of the operators that run inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func.overloadpacket))
        return func(*args, **(kwargs or {}))


def tf32_places(operators: Iterable[str]) -> set[str]:
    """Return the torch settings, such as `cuda.matmul`, that decide whether these operators use TF32 for float32."""
    names = {name.rpartition(".")[2] for name in operators}
    patterns = {"cudnn.conv": _CONVOLUTION, "cudnn.rnn": _RECURRENT, "cuda.matmul": _PRODUCT}
    return {place for place, pattern in patterns.items() if any(map(pattern.search, names))}


def takes_float32(tensors: Iterable[Tensor]) -> bool:
    return any(tensor.dtype in ROUNDED and tensor.device.type in KINDS for tensor in tensors)


def may_use_tf32(operators: Iterable[str]) -> bool:
    return any(map(allows_tf32, tf32_places(operators)))


def must_use_float32(operators: Iterable[str]) -> bool:
    return not all(map(allows_tf32, tf32_places(operators)))


_PRECISIONS = ("highest", "high", "medium")


@contextmanager
def restored(settings: Mapping[str, Any]) -> Iterator[list[str]]:
    """Run the block under the settings of a trace; yield the names of those that this torch or machine refuses."""
    refused: list[str] = []
    with ExitStack() as stack:
        for name, value in settings.items():
            if name in _SETTERS:
                try:
                    _SETTERS[name](stack, value)
                except (AttributeError, ValueError, TypeError, RuntimeError, OverflowError):
                    refused.append(name)
        _deterministic(stack, settings)
        if settings.get("inference") is True:
            # inference_mode(False) would turn gradients on
            stack.enter_context(torch.inference_mode())
        yield refused


def _set(read: Callable[[], Any], write: Callable[[Any], Any], stack: ExitStack, value: Any) -> None:
    before = read()
    if value != before:
        stack.callback(write, before)
        write(value)


def _deterministic(stack: ExitStack, settings: Mapping[str, Any]) -> None:
    on, warn_only = settings.get("deterministic") is True, settings.get("deterministic_warn_only") is True
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if (on, warn_only) != before:
        stack.callback(torch.use_deterministic_algorithms, before[0], warn_only=before[1])
        torch.use_deterministic_algorithms(on, warn_only=warn_only)


def _precision(stack: ExitStack, value: Any) -> None:
    if value in _PRECISIONS:
        _set(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, stack, value)


def _fp32_precisions(stack: ExitStack, value: Any) -> None:
    for place, precision in parse_precisions(str(value)).items():
        with suppress(AttributeError, RuntimeError):
            _set(partial(read_precision, place), partial(set_precision, place), stack, precision)


def _threads(stack: ExitStack, value: Any) -> None:
    if type(value) is int and 0 < value <= (os.cpu_count() or 1):
        _set(torch.get_num_threads, torch.set_num_threads, stack, value)


def _default_dtype(stack: ExitStack, value: Any) -> None:
    dtype = DTYPES.get(str(value))
    if dtype is not None and dtype.is_floating_point:
        _set(torch.get_default_dtype, torch.set_default_dtype, stack, dtype)


def _flag(suffix: str, stack: ExitStack, value: Any) -> None:
    before = flag_reader(suffix)()
    if before is not None and value != flag_text(before):
        stack.callback(write_flag, suffix, before)
        write_flag(suffix, value)


_SETTERS: dict[str, Callable[[ExitStack, Any], None]] = {
    "matmul_precision": _precision,
    "fp32_precision": _fp32_precisions,
    "threads": _threads,
    "default_dtype": _default_dtype,
    "flush_denormal": partial(_set, flushes_denormals, torch.set_flush_denormal),
    **{
        name: partial(_flag, suffix)
        for name, suffix in (HOST_FLAGS | (CUDA_FLAGS if torch.backends.cuda.is_built() else {})).items()
    },
}


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch's operators use one thread, because processes that are forked later wait forever for others."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
