"""Private interfaces of torch for accelerators: their streams, and records of their work."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from opgrip.capture.torch_compat.torch_private import out_of_tree_device
from opgrip.platform.private_apis import PrivatePlaces

_places = PrivatePlaces()
private_places = _places.report


def _queries(**names: str) -> dict[str, Callable[..., Any]]:
    functions = {use: _places.take(f"torch._C.{name}", None, "torch's public functions") for use, name in names.items()}
    return {use: function for use, function in functions.items() if function is not None}


_STREAM_QUERIES = {
    "cuda": _queries(
        is_capturing="_cuda_isCurrentStreamCapturing",
        current_device="_cuda_getDevice",
        stream_handle="_cuda_getCurrentRawStream",
    ),
    "xpu": _queries(current_device="_xpu_getDevice", stream_handle="_xpu_getCurrentRawStream"),
}
_CURRENT_DEVICE = _queries(current_device="_accelerator_getDeviceIndex")


def stream_queries(kind: str) -> dict[str, Callable[..., Any]]:
    """Return torch's C functions for those attributes of `DeviceQueries` that have one, by name of the attribute.

    kind : type of the device
    """
    if kind in _STREAM_QUERIES:
        return _STREAM_QUERIES[kind]
    return _CURRENT_DEVICE if kind == out_of_tree_device() else {}


def _profiler_entries(**names: str) -> tuple[tuple[Any, str], ...]:
    fallback = "a program whose kernels are timed cannot profile itself"
    return tuple(
        (sys.modules[f"torch.autograd.{module}"], name)
        for name, module in names.items()
        if _places.take(f"torch.autograd.{module}.{name}", None, fallback) is not None
    )


# functions, as owner and name, of which every profile (and `emit_nvtx`) calls one first
PREPARE_PROFILER = _profiler_entries(_prepare_profiler="profiler", _enable_profiler="profiler")
