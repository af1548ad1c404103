"""Operators that are registered with torch's dispatcher, and what sample calls are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from opgrip.platform.private_apis import PrivatePlaces

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and named arguments."""

FORWARD, IN_PLACE = "forward", "in place"


@dataclass(frozen=True, slots=True)
class Entry:
    """What can be called with sample inputs.

    Attributes
    ----------
    name : as torch's table calls it: `add`, `nn.functional.relu`, `optim.Adam`; `my_ops.scale.default` of a registered
        operator
    categories : that it belongs to
    function : what is called
    in_place : the variant that writes into its first argument; None where there is none
    dtypes : of its arguments that a device has
    differentiable : those of them that it has gradients for
    samples : arguments on a device of a dtype, which may want gradients; drawn from torch's, numpy's and Python's
        generators
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
"""Namespaces of what comes with torch."""

_places = PrivatePlaces()
_all_names = _places.take("torch._C._dispatch_get_all_op_names", list, "operators beside torch's table are not found")
_has_kernel_for = _places.take(
    "torch._C._dispatch_has_kernel_for_dispatch_key",
    lambda name, key: False,
    "operators that are nothing but calls of others are not told apart",
)


def private_places() -> dict[str, str]:
    """For each private place of torch that is used here `found`, or what is done instead where this torch lacks it."""
    return _places.report()


def registered_operators() -> Iterator[Any]:
    """All overloads, in the order of their names."""
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
    """Whether another package registered an operator."""
    return function.namespace not in OF_TORCH


def is_public(function: Any) -> bool:
    """Whether an operator is one of torch's that programs call."""
    return function.namespace == "aten" and not name_of(function).split(".")[1].startswith("_")


def is_composite(function: Any) -> bool:
    """Whether an operator is nothing but calls of others, and so stands in no trace."""
    return bool(_has_kernel_for(function.name(), "CompositeImplicitAutograd"))


def name_of(function: Any) -> str:
    """An overload's name in a trace."""
    return str(function)
