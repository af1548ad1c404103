"""Settings of torch that change how operators compute, and the reduced precision of float32 operators, such as TF32."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from operator import attrgetter
from sys import float_info
from typing import Any

import torch

from opgrip.errors import raise_if_from_program
from opgrip.platform.private_apis import PrivatePlaces

# paths of the settings relative to `torch.backends`
PLACES = ("cuda.matmul", "cudnn.conv", "cudnn.rnn", "mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn")
VALUES = ("none", "ieee", "tf32", "bf16")
# initial values that differ from `none`, which means full float32 precision (`ieee`)
USUAL = {"cudnn.conv": ("tf32",), "cudnn.rnn": ("tf32",)}

_places = PrivatePlaces()
private_places = _places.report

_getter = _places.take(
    "torch._C._get_fp32_precision_getter", None, "precisions are read through Python objects, 20 times as slowly"
)
_READERS: Mapping[str, Callable[[], str]] = {
    place: partial(attrgetter(f"{place}.fp32_precision"), torch.backends)
    if _getter is None
    else partial(_getter, *place.replace("cudnn", "cuda").split("."))
    for place in PLACES
}
# equivalent settings of torch before 2.9
_OLDER = {"cuda.matmul": "cuda.matmul.allow_tf32", "cudnn.conv": "cudnn.allow_tf32", "cudnn.rnn": "cudnn.allow_tf32"}


# settings of which torch._C has a function to read and one to write them: name in traces, and suffix of these functions
HOST_FLAGS = {
    "fill_uninitialized_memory": "deterministic_fill_uninitialized_memory",
    "mkldnn": "mkldnn_enabled",
    "mkldnn_deterministic": "mkldnn_deterministic",
    "nnpack": "nnpack_enabled",
    "cpu_fp16_reduction": "cpu_allow_fp16_reduced_precision_reduction",
    "quantized_engine": "qengine",
}
CUDA_FLAGS = {
    "cudnn": "cudnn_enabled",
    "cudnn_benchmark": "cudnn_benchmark",
    "cudnn_deterministic": "cudnn_deterministic",
    "cudnn_tf32": "cudnn_allow_tf32",
    "cudnn_depthwise_kernel": "cudnn_depthwise_kernel",
    "fp16_reduction": "cublas_allow_fp16_reduced_precision_reduction",
    "bf16_reduction": "cublas_allow_bf16_reduced_precision_reduction",
    "fp16_accumulation": "cublas_allow_fp16_accumulation",
    "blas_library": "blas_preferred_backend",
    "linalg_library": "linalg_preferred_backend",
    "rocm_attention": "rocm_fa_preferred_backend",
    "miopen_immediate": "miopen_immediate",
    "cublaslt_grouped_products": "cublaslt_prefer_grouped_gemm",
    "native_kernels": "native_aot_enabled",
}


def flag_reader(suffix: str) -> Callable[[], Any]:
    read: Callable[[], Any] = getattr(torch._C, f"_get_{suffix}", lambda: None)
    return read


def flag_text(value: Any) -> bool | int | str | None:
    """Return the form of a flag in a trace: the name of a member of an enumeration, `True,False` for a tuple."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return value if value is None or isinstance(value, bool | int | str) else str(value.name)


def write_flag(suffix: str, value: Any) -> None:
    """Set a flag to a value of the type that it has, or to the form of such a value in a trace."""
    before, write = flag_reader(suffix)(), getattr(torch._C, f"_set_{suffix}")
    if isinstance(before, tuple):
        write(*(value if isinstance(value, tuple) else [part == "True" for part in value.split(",")]))
    else:
        write(value if isinstance(value, type(before)) else getattr(type(before), value))


_smallest_normal = float_info.min


def flushes_denormals() -> bool:
    # torch cannot be asked; Python's arithmetic has the same flag
    return _smallest_normal * 0.5 == 0


def read_precision(place: str) -> str | None:
    try:
        return _READERS[place]()
    except (AttributeError, RuntimeError) as error:
        raise_if_from_program(error)
        return None


def allows_tf32(place: str) -> bool:
    """Return True if the program's settings allow a GPU backend to compute float32 operators as TF32."""
    value = read_precision(place)
    if value is not None:
        return value == "tf32"
    try:
        return bool(attrgetter(_OLDER[place])(torch.backends))
    except (AttributeError, RuntimeError):
        return False


def set_precision(place: str, value: Any) -> None:
    attrgetter(place)(torch.backends).fp32_precision = value


def is_tf32(operator: str, context: Mapping[str, Any]) -> bool:
    """Return True if a GPU may compute a float32 operator as TF32, given the settings recorded with the call."""
    values = parse_precisions(str(context.get("fp32_precision", "")))
    of_products = "tf32" if context.get("matmul_precision") in ("high", "medium") else "ieee"
    in_products = values.get("cuda.matmul", of_products) == "tf32"
    by_cudnn = "tf32" if context.get("cudnn_tf32", True) else "ieee"
    in_cudnn = {
        word: values.get(place, by_cudnn) == "tf32" if context.get("cudnn", True) else in_products
        for word, place in (("conv", "cudnn.conv"), ("rnn", "cudnn.rnn"))
    }
    if not operator.startswith("aten."):
        return in_products or any(in_cudnn.values())
    return next((allowed for word, allowed in in_cudnn.items() if word in operator), in_products)


def describe_precisions() -> str:
    """Return the settings that differ from torch's defaults, as a text such as `cuda.matmul:tf32,mkldnn.conv:bf16`."""
    return _describe(tuple(map(read_precision, PLACES)))


@lru_cache(maxsize=64)
def _describe(values: tuple[str | None, ...]) -> str:
    unusual = {
        place: value
        for place, value in zip(PLACES, values, strict=True)
        if value not in (None, *USUAL.get(place, ("none", "ieee")))
    }
    return ",".join(f"{place}:{value}" for place, value in unusual.items())


def parse_precisions(text: str) -> dict[str, str]:
    """Return the precisions in a text of `describe_precisions`, by the name of the setting."""
    pairs = (part.partition(":") for part in text.split(","))
    return {place: value for place, _, value in pairs if place in PLACES and value in VALUES}
