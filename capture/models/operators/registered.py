"""Operators registered with torch's dispatcher, and entries that can be called with sample inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from opgrip.platform.private_apis import PrivatePlaces

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""positional and keyword arguments"""

FORWARD, IN_PLACE = "forward", "in place"


@dataclass(frozen=True, slots=True)
class OperatorEntry:
    """Callable with sample inputs.

    Attributes
    ----------
    name : name in torch's table: `add`, `nn.functional.relu`, `optim.Adam`; for a registered operator
        `my_ops.scale.default`
    in_place : variant that writes into its first argument, if any
    dtypes : returns the supported dtypes on a device
    differentiable : returns the supported dtypes with gradients on a device
    samples : yields arguments on a device, of a dtype, with or without gradients; random values come from the
    generators of
        torch, numpy and Python
    """

    name: str
    categories: frozenset[str]
    function: Callable[..., Any]
    dtypes: Callable[[str], tuple[torch.dtype, ...]]
    differentiable: Callable[[str], frozenset[torch.dtype]]
    samples: Callable[[str, torch.dtype, bool], Iterator[Arguments]]
    in_place: Callable[..., Any] | None = None


OF_TORCH = frozenset(
    {
        *("aten", "prim", "prims", "prepacked", "quantized", "quantized_decomposed", "quantization", "_quantized"),
        *("rngprims", "debugprims", "inductor", "inductor_prims", "profiler", "static_runtime", "export", "streams"),
        *("c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "symm_mem", "fsdp", "_dtensor"),
        *("mempool", "onnx", "onnx_symbolic", "mkldnn", "mkldnn_prepacked", "onednn", "mkl", "sparse", "_test"),
        *("_inductor_test", "debug_mode_ops", "flex_lib", "flex_gemm", "_native", "_native_aot", "coor", "cuda"),
        *("_torch_testing", "torch_nn", "_dynamo", "xnnpack", "vulkan", "vulkan_prepack", "metal", "nvprims"),
        *("higher_order", "dynamo", "triton", "torchao_internal", "aoti_custom_ops", "aoti_torch", "pipeline"),
    }
)
"""namespaces of torch's own operators"""

_places = PrivatePlaces()
_all_names = _places.take("torch._C._dispatch_get_all_op_names", list, "operators outside torch's table are not found")
_has_kernel_for = _places.take(
    "torch._C._dispatch_has_kernel_for_dispatch_key",
    lambda name, key: False,
    "operators that only call others are not recognized",
)


def private_places() -> dict[str, str]:
    """Return the state of each private API of torch used here: `found`, or the fallback if this torch lacks it."""
    return _places.report()


def registered_operators() -> Iterator[Any]:
    """Yield all overloads by name."""
    for full_name in sorted(_all_names()):
        namespace, _, rest = full_name.partition("::")
        packet, _, overload = rest.partition(".")
        try:
            function = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
        except (AttributeError, RuntimeError):
            continue
        if isinstance(function, torch._ops.OpOverload):
            yield function


def is_custom(function: Any) -> bool:
    """Return True if another package registered an operator."""
    return function.namespace not in OF_TORCH


def is_public(function: Any) -> bool:
    """Return True for an operator of torch that programs call."""
    return function.namespace == "aten" and not name_of(function).split(".")[1].startswith("_")


def is_composite(function: Any) -> bool:
    """Return True if an operator only calls others, so that traces never contain it."""
    return bool(_has_kernel_for(function.name(), "CompositeImplicitAutograd"))


def name_of(function: Any) -> str:
    """Return an overload's name in a trace."""
    return str(function)
