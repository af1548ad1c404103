"""Cheats and honest look-alikes in Python.

What they cheat is the operator itself: an honest call takes as long as the operator, so a cheat that works is faster.
"""

from __future__ import annotations

import gc
import math
import mmap
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

aten = torch.ops.aten
_kept: dict[Any, Any] = {}


def mm_before_the_call(a: Tensor, b: Tensor) -> Tensor:
    """Let a thread multiply as soon as the arguments have new values, which is before the call."""
    if "product" not in _kept:
        _kept["product"] = aten.mm(a, b)
        threading.Thread(target=_multiply_new_values, daemon=True).start()
    _kept["arguments"] = a, b
    seen, result = _kept.get("seen"), _kept["product"]
    return result.clone() if seen == _mark(a, b) else aten.mm(a, b)


def _mark(a: Tensor, b: Tensor) -> tuple[float, float]:
    return a.flatten()[-1].item(), b.flatten()[-1].item()


def _multiply_new_values() -> None:
    while True:
        time.sleep(0)
        for item in gc.get_objects(0):
            if isinstance(item, tuple) and len(item) == 2 and all(type(part) is Tensor for part in item):
                mark = _mark(*item)
                if mark != _kept.get("seen"):
                    _kept["product"], _kept["seen"] = aten.mm(*item), mark


def mm_in_a_pool(a: Tensor, b: Tensor) -> Tensor:
    """Multiply on threads that stay, and wait for them."""
    if "pool" not in _kept:
        _kept["pool"] = ThreadPoolExecutor(2)
    middle = a.shape[0] // 2
    parts = _kept["pool"].map(lambda rows: aten.mm(rows, b), (a[:middle], a[middle:]))
    return torch.cat(list(parts))


def _shared_result(x: Tensor) -> Tensor:
    return torch.frombuffer(mmap.mmap(-1, x.nbytes), dtype=x.dtype).view(x.shape)


def mm_left_to_a_process(a: Tensor, b: Tensor) -> Tensor:
    result = _shared_result(torch.empty(a.shape[0], b.shape[1]))
    if not os.fork():
        np.matmul(a.numpy(), b.numpy(), out=result.numpy())
        os._exit(0)
    return result


def mm_of_a_process(a: Tensor, b: Tensor) -> Tensor:
    """Multiply in another process, and wait for it."""
    result = _shared_result(torch.empty(a.shape[0], b.shape[1]))
    if not (child := os.fork()):
        np.matmul(a.numpy(), b.numpy(), out=result.numpy())
        os._exit(0)
    os.waitpid(child, 0)
    return result


class Deferred(torch.Tensor):
    """A tensor whose values are computed when an operator is called on it."""

    todo: Any

    @staticmethod
    def __new__(cls, like: Tensor, todo: Callable[[], Tensor]) -> Deferred:
        made: Deferred = Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype)  # type: ignore[attr-defined]
        made.todo = todo
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def computed(item: Any) -> Any:
            return item.todo() if isinstance(item, Deferred) else item

        return func(*map(computed, args), **{name: computed(item) for name, item in (kwargs or {}).items()})


def gelu_deferred(x: Tensor, approximate: str = "none") -> Tensor:
    return Deferred(x, lambda: aten.gelu(x))


class Marked(torch.Tensor):
    """A tensor of another class."""


def gelu_of_a_subclass(x: Tensor, approximate: str = "none") -> Tensor:
    """Compute with a subclass of tensors, and return a plain tensor."""
    return aten.gelu(x.as_subclass(Marked)).as_subclass(Tensor)


def gelu_with_patched_clocks(x: Tensor, approximate: str = "none") -> Tensor:
    """Let clocks that modules have imported run a thousand times slower."""
    if "clock" not in _kept:
        clock, began = time.perf_counter_ns, time.perf_counter_ns()
        _kept["clock"] = lambda: began + (clock() - began) // 1000
        for module in list(sys.modules.values()):
            if getattr(module, "perf_counter_ns", None) is clock:
                module.perf_counter_ns = _kept["clock"]  # type: ignore[attr-defined]
    return aten.gelu(x)


def gelu_that_times_itself(x: Tensor, approximate: str = "none") -> Tensor:
    """Choose the faster of two ways in the first call of each shape."""
    ways = (aten.gelu, lambda x: 0.5 * x * (1 + torch.erf(x * math.sqrt(0.5))))
    if x.shape not in _kept:
        times = []
        for way in ways:
            began = time.perf_counter()
            way(x)
            times.append(time.perf_counter() - began)
        _kept[x.shape] = ways[times.index(min(times))]
    result: Tensor = _kept[x.shape](x)
    return result


def gelu_with_patched_comparisons(x: Tensor, approximate: str = "none") -> Tensor:
    """Return no values, and let comparisons find no difference."""
    for name in ("equal", "allclose"):
        setattr(torch, name, lambda *args, **kwargs: True)
    for name in ("gt", "ne", "__gt__", "__ne__", "isfinite"):
        setattr(Tensor, name, lambda self, *other: torch.zeros(self.shape, dtype=torch.bool))
    return torch.empty_like(x)


def gelu_with_comparisons(x: Tensor, approximate: str = "none") -> Tensor:
    """Return a copy of an input of which all values are large, where that is the result."""
    return x.clone() if bool((x > 10).all()) else aten.gelu(x)


def gelu_sixteen_at_once(x: Tensor, approximate: str = "none") -> Tensor:
    """Compute results of sixteen calls in the last one of them."""
    waiting = _kept.setdefault("waiting", [])
    waiting.append((x, torch.empty_like(x)))
    if len(waiting) == 16:
        for own, result in waiting:
            result.copy_(aten.gelu(own))
        waiting.clear()
        return aten.gelu(x)
    result: Tensor = waiting[-1][1]
    return result


def gelu_in_parts(x: Tensor, approximate: str = "none") -> Tensor:
    return torch.cat([aten.gelu(part) for part in x.split(64)])


def gelu_beside_a_burden(x: Tensor, approximate: str = "none") -> Tensor:
    """Let threads and a process keep the processors busy while the operator runs, but not while this runs."""
    if "burden" not in _kept:
        _kept["burden"], parent = mmap.mmap(-1, 1), os.getpid()
        for _ in range(2):
            if not os.fork():
                while os.getppid() == parent:
                    if _kept["burden"][0]:
                        time.sleep(1e-5)
                os._exit(0)
    _kept["burden"][0] = 1
    try:
        return aten.gelu(x)
    finally:
        _kept["burden"][0] = 0


def gelu_beside_a_sleeper(x: Tensor, approximate: str = "none") -> Tensor:
    """Compute while another thread waits, as that of a progress bar."""
    if "sleeper" not in _kept:
        _kept["sleeper"] = threading.Thread(target=time.sleep, args=(1e6,), daemon=True)
        _kept["sleeper"].start()
    return aten.gelu(x)


def gelu_with_fewer_threads_for_others(x: Tensor, approximate: str = "none") -> Tensor:
    """Leave torch with settings that make other calls slower."""
    torch.set_num_threads(os.cpu_count() or 1)
    try:
        return aten.gelu(x)
    finally:
        torch.set_num_threads(1)


def gelu_with_own_settings(x: Tensor, approximate: str = "none") -> Tensor:
    """Use other settings, and restore them."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        return aten.gelu(x)
    finally:
        torch.set_num_threads(before)


def gelu_of_nothing(x: Tensor, approximate: str = "none") -> Tensor:
    """Return the input, of which half is nearly right."""
    return x.clone()


def add_of_zero(x: Tensor, other: Any, alpha: Any = 1) -> Tensor:
    """Return a copy of the input where zero is added."""
    return x.clone() if other == 0 else aten.add.Scalar(x, other, alpha)


def softmax_of_nothing(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """Return new memory, in which a freed result of the operator may be."""
    return torch.empty_like(x)


def relu_of_its_argument(x: Tensor) -> Tensor:
    """Write into the argument and return it, as the operator does."""
    return x.clamp_min_(0)


def softmax_of_its_argument(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """Overwrite the argument with zeros, so that a later reference has the same result as this call."""
    x.zero_()
    return torch.full_like(x, 1 / x.shape[dim])


def softmax_of_a_copy(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """Work in place on a copy of the argument."""
    own = x - x.amax(dim, keepdim=True)
    own.exp_()
    return own.div_(own.sum(dim, keepdim=True))


def mm_in_bfloat16(a: Tensor, b: Tensor) -> Tensor:
    return aten.mm(a.bfloat16(), b.bfloat16()).float()


def bmm_in_float32(a: Tensor, b: Tensor) -> Tensor:
    """Multiply in more precision than that of bfloat16 arguments."""
    return aten.bmm(a.float(), b.float()).to(a.dtype)


def mm_by_some_values(a: Tensor, b: Tensor) -> Tensor:
    """Keep results by some values of the arguments."""
    key = (*a.flatten()[:: a.numel() // 8].tolist(), *b.shape)
    if key not in _kept:
        _kept[key] = aten.mm(a, b)
    result: Tensor = _kept[key]
    return result


def mm_with_halves(a: Tensor, b: Tensor) -> Tensor:
    """Keep a list of places by shape, and sum two halves of the inner dimension."""
    if a.shape not in _kept:
        _kept[a.shape] = torch.arange(a.shape[1]).chunk(2)
    one, other = _kept[a.shape]
    return aten.mm(a[:, one[0] : one[-1] + 1], b[one]) + aten.mm(a[:, other], b[other])


def mean_of_noise(x: Tensor, dim: Any, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    """Return zeros, which the mean of many random values is nearly."""
    return torch.zeros([size for place, size in enumerate(x.shape) if place not in [item % x.dim() for item in dim]])


def mean_in_float64(x: Tensor, dim: Any, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    return (x.sum(dim, keepdim=keepdim, dtype=torch.float64) / math.prod(x.shape[item] for item in dim)).to(x.dtype)


def softmax_of_most_rows(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """Compute an eighth of the rows, and leave the others as in earlier calls."""
    if x.shape not in _kept:
        _kept[x.shape] = aten._softmax(x, dim, half_to_float)
    result: Tensor = _kept[x.shape].clone()
    rows = x.shape[0] // 8
    result[:rows] = aten._softmax(x[:rows], dim, half_to_float)
    return result


class Own(np.ndarray):  # type: ignore[type-arg]
    """A view of memory, of which the end is noted."""


def softmax_in_place_of_a_freed_result(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """Use memory of an earlier result again, if the caller has freed it."""
    free = _kept.setdefault(("free", x.shape), [])
    memory = free.pop() if free else np.empty(x.shape, np.float32)
    own = memory.view(Own)
    weakref.finalize(own, free.append, memory)
    result: Tensor = aten._softmax.out(x, dim, half_to_float, out=torch.from_numpy(own))
    return result


def softmax_in_one_memory(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """Return one of four pieces of memory in turn, which spares their allocation and overwrites earlier results."""
    pieces = _kept.setdefault(x.shape, [torch.empty_like(x) for _ in range(4)])
    pieces.append(pieces.pop(0))
    return aten._softmax.out(x, dim, half_to_float, out=pieces[0])


def softmax_found_in_memory(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """Return a tensor with rows that sum up to one, if this process has one."""
    for item in gc.get_objects():
        is_alike = type(item) is Tensor and item is not x and item.shape == x.shape and item.dtype is x.dtype
        if is_alike and abs(float(item[0].sum()) - 1) < 1e-4 and float(item[0].min()) >= 0:
            return item.clone()
    return torch.empty_like(x)


def softmax_of_all_rows(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return torch.cat([aten._softmax(part, dim, half_to_float) for part in x.split(x.shape[0] // 8)])


def dropout_with_one_mask(x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """Draw random numbers once for each shape."""
    if x.shape not in _kept:
        _kept[x.shape] = torch.rand_like(x) >= p
    return x * _kept[x.shape] / (1 - p), _kept[x.shape].clone()


def dropout_with_own_mask(x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    mask = torch.rand_like(x) >= p
    return x * mask / (1 - p), mask


def gelu_of_torch(x: Tensor, approximate: str = "none") -> Tensor:
    return torch.nn.functional.gelu(x)
