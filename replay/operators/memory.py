"""The tensors among a call's arguments, their size in bytes, and the memory that a call allocates."""

from __future__ import annotations

import gc
import os
import resource
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.profiler import profile

from opgrip.platform.machine import lines
from opgrip.replay.operators.devices import is_accelerator, limit_device_memory, module_of
from opgrip.traces.schema.arguments import leaves, tensors
from opgrip.traces.schema.tensor_specs import stored_elements

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Function = Callable[..., Any]


def tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in leaves(tree) if isinstance(leaf, Tensor)]


def copied(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


T = TypeVar("T")

# out-of-memory messages of torch, CUDA libraries, Triton, ONNX Runtime and XLA, in lower case
NO_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "failed to allocate memory",
    "resource_exhausted",
    "alloc_failed",
)

LARGE = 1 << 16  # size of results in bytes above which new pages affect the time


@dataclass(frozen=True, slots=True)
class CallMemory:
    """Memory that one call allocates, in bytes.

    allocated : sum of all allocations
    peak : largest amount of allocated memory at one time
    """

    allocated: int
    peak: int
    reserved: int | None = None


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an error, or one of its causes, means that memory ran out."""
    cause: BaseException | None = error
    while cause is not None:
        text = str(cause).lower()
        if isinstance(cause, MemoryError | torch.OutOfMemoryError) or any(words in text for words in NO_MEMORY):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def release_memory(device: str) -> None:
    gc.collect()
    if is_accelerator(device) and hasattr(module_of(device), "empty_cache"):
        module_of(device).empty_cache()


def bytes_of(tree: Any) -> int:
    """Return the number of bytes of all tensors in `tree`; elements that an expanded tensor repeats count once."""
    return sum(stored_elements(spec) * spec.dtype.itemsize for spec in tensors(tree))


def mostly_fresh(fresh_bytes: Any, results: Any) -> Any:
    return fresh_bytes * 2 >= results


def with_memory(run: Callable[[], T], device: str) -> tuple[T, CallMemory]:
    if is_accelerator(device) and hasattr(module_of(device), "memory_stats"):
        return _with_device_memory(run, device)
    # Kineto reads this when it starts; at lower levels it prints two lines per profile
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile(profile_memory=True) as profiled:
        result = run()
    live = peak = allocated = 0
    for event in profiled.kineto_results.events():
        if event.name() == "[memory]":
            size = event.nbytes()
            live += size
            allocated += max(size, 0)
            peak = max(peak, live)
    return result, CallMemory(allocated, peak)


def _with_device_memory(run: Callable[[], T], device: str) -> tuple[T, CallMemory]:
    module = module_of(device)
    module.synchronize(device)
    # otherwise the call reuses memory of earlier calls, and nothing is reserved
    if hasattr(module, "empty_cache"):
        module.empty_cache()
    module.reset_peak_memory_stats(device)
    before = module.memory_stats(device)
    result = run()
    module.synchronize(device)
    after = module.memory_stats(device)
    allocated = "allocated_bytes.all.allocated"
    peak = after["allocated_bytes.all.peak"] - before["allocated_bytes.all.current"]
    reserved = None
    if "reserved_bytes.all.peak" in after:
        reserved = after["reserved_bytes.all.peak"] - before["reserved_bytes.all.current"]
    # some backends do not count the sum of all allocations
    return result, CallMemory(after[allocated] - before[allocated] if allocated in after else peak, peak, reserved)


def limit_memory(limit: int | None, device: str) -> int | None:
    if is_accelerator(device):
        return limit_device_memory(device, limit)
    if limit is None:
        return None
    used = next((int(line.split()[1]) << 10 for line in lines("/proc/self/status") if line.startswith("VmData")), 0)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_DATA, (used + limit, used + limit))
    return limit
