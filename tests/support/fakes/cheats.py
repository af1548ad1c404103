"""Candidates for softmax that cheat, one for each way that is known, and honest ones that are slow.

Honest ones take `SLOW_S`. A cheat that works seems to take less.
"""

import ctypes
import gc
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter, sleep
from typing import Any

import torch
from torch import Tensor

SLOW_S = 0.02
_kept: dict[Any, Any] = {}


def honest(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    until = perf_counter() + SLOW_S
    while perf_counter() < until:
        pass
    return torch.softmax(x, dim)


def honest_with_a_thread(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    results: list[Tensor] = []
    thread = threading.Thread(target=lambda: results.append(honest(x, dim, half_to_float)))
    thread.start()
    thread.join()
    return results[0]


def honest_with_workers(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """Compute on a thread that stays, in a process in which torch replaced a function of torch, as compilers do."""
    if "pool" not in _kept:
        _kept["pool"] = ThreadPoolExecutor(1)
    result: Tensor = _kept["pool"].submit(honest, x, dim, half_to_float).result()
    return result


def _cached(key: Any, x: Tensor, dim: int) -> Tensor:
    if key not in _kept:
        _kept[key] = honest(x, dim, False)
    result: Tensor = _kept[key]
    return result.clone()


def cached_by_identity(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return _cached(id(x), x, dim)


def cached_by_address(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return _cached(x.data_ptr(), x, dim)


def cached_by_version(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return _cached((x._version, x.shape), x, dim)


def cached_by_value(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return _cached(bytes(x.numpy().data), x, dim)


class Lazy(torch.Tensor):
    """A tensor that is computed when something asks for its values."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if args and isinstance(args[0], Lazy) and (todo := args[0].__dict__.pop("todo", None)) is not None:
                args[0].copy_(honest(*todo))
            return func(*args, **(kwargs or {}))


def lazy(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    result: Any = torch.empty_like(x).as_subclass(Lazy)
    result.todo = (x, dim, half_to_float)
    return result


def lazy_without_check(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """Return a lazy tensor, and replace the check of the process that it is a plain one."""
    sys.modules["__main__"]._memory = lambda leaf: leaf.untyped_storage()  # type: ignore[attr-defined]
    return lazy(x, dim, half_to_float)


def _fill(result: Tensor, x: Tensor, dim: int) -> None:
    result.copy_(honest(x, dim, False))


def left_on_a_thread(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """Return at once, and let a new thread compute the result later, in work that needs no interpreter."""
    result = torch.empty_like(x)

    def fill() -> None:
        sleep(SLOW_S)
        torch.softmax(x, dim, out=result)

    threading.Thread(target=fill).start()
    return result


def left_on_a_python_thread(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    result = torch.empty_like(x)
    threading.Thread(target=_fill, args=(result, x, dim)).start()
    return result


def left_on_a_daemon(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """Return at once, and let a thread that the first call started compute the result later."""
    if "work" not in _kept:
        _kept["work"] = []

        def serve() -> None:
            while True:
                if _kept["work"]:
                    _fill(*_kept["work"].pop())
                sleep(0)

        threading.Thread(target=serve, daemon=True).start()
        return honest(x, dim, half_to_float)
    result = torch.empty_like(x)
    _kept["work"].append((result, x, dim))
    return result


class SlowClock:
    """A clock that takes as much less time as `slowness` says."""

    def __init__(self, slowness: int) -> None:
        self._clock, self._slowness, self._began = time.perf_counter_ns, slowness, time.perf_counter_ns()

    def perf_counter_ns(self) -> int:
        return self._began + (self._clock() - self._began) // self._slowness


def with_patched_clock(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    if "clock" not in _kept:
        _kept["clock"] = SlowClock(10_000)
        time.perf_counter_ns = _kept["clock"].perf_counter_ns
    return honest(x, dim, half_to_float)


def with_clock_of_the_process(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """Replace the clock of the module that measures, which no snapshot of `time` shows."""
    if "clock" not in _kept:
        sys.modules["__main__"].time = _kept["clock"] = SlowClock(10_000)  # type: ignore[attr-defined]
    return honest(x, dim, half_to_float)


def with_stopped_clock(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    if "clock" not in _kept:
        sys.modules["__main__"].time = _kept["clock"] = SlowClock(10**9)  # type: ignore[attr-defined]
    return honest(x, dim, half_to_float)


def with_patched_elapsed_time(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    torch.cuda.Event.elapsed_time = lambda self, end: 1e-6  # type: ignore[method-assign]
    return honest(x, dim, half_to_float)


def with_patched_synchronize(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    torch.cuda.synchronize = lambda device=None: None
    return honest(x, dim, half_to_float)


def many_calls_at_once(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """Return at once in fifteen of sixteen calls; the sixteenth call computes the results of all."""
    batch = _kept.setdefault("batch", [])
    result = torch.empty_like(x)
    batch.append((result, x, dim))
    if len(batch) == 16:
        for item in batch:
            _fill(*item)
        batch.clear()
    return result


def from_the_reference(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """Return a tensor that looks like the operator's result, if frames or the garbage collector of this process have
    one.
    """
    frame, found = sys._getframe(1), list(gc.get_objects())
    while frame is not None:
        found += frame.f_locals.values()
        frame = frame.f_back  # type: ignore[assignment]
    for item in found:
        if isinstance(item, Tensor) and item is not x and item.shape == x.shape and item.dtype is x.dtype:
            sums = item.sum(dim)
            if torch.allclose(sums, torch.ones_like(sums), atol=1e-3):
                return item
    return torch.empty_like(x)


def only_first_calls(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """Compute only in the first six calls, whose results are probably checked before times are measured."""
    _kept["calls"] = _kept.get("calls", 0) + 1
    return honest(x, dim, half_to_float) if _kept["calls"] <= 6 else torch.empty_like(x)


def only_first_values(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """Return the results for the values of the first call, which is right if later calls have the same values."""
    if "first" not in _kept:
        _kept["first"] = honest(x, dim, half_to_float)
    result: Tensor = _kept["first"]
    return result.clone()


def less_precise(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return torch.softmax(x.bfloat16(), dim).float()


def constant(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """Return the result without computing it if the first and the last element are equal, as in a constant input."""
    if x.flatten()[0] == x.flatten()[-1]:
        return torch.full_like(x, 1 / x.shape[dim])
    return honest(x, dim, half_to_float)


def same_memory(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """Return the same tensor each time, which spares its allocation."""
    if "result" not in _kept:
        _kept["result"] = torch.empty_like(x)
    result: Tensor = torch.softmax(x, dim, out=_kept["result"])
    return result


def continued_by_timer(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """Let a timer of the system continue this process after it is stopped."""
    library = ctypes.CDLL(None)
    if "timer" not in _kept:
        # the system stops timers whose signal is ignored
        signal.signal(signal.SIGCONT, lambda *received: None)
        # struct sigevent: value, signal, SIGEV_SIGNAL
        event, _kept["timer"] = (ctypes.c_int * 16)(0, 0, signal.SIGCONT, 0), ctypes.c_void_p()
        library.timer_create(time.CLOCK_MONOTONIC, event, ctypes.byref(_kept["timer"]))
    result = honest(x, dim, half_to_float)
    # struct itimerspec: seconds and nanoseconds of the interval and of the first time
    library.timer_settime(_kept["timer"], 0, (ctypes.c_long * 4)(0, 5_000_000, 0, 5_000_000), None)
    return result


def detached(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """Return the id of a process in each element, and leave that process, whose parent ends."""
    read, write = os.pipe()
    if not (child := os.fork()):
        if not os.fork():
            os.setsid()
            os.write(write, b"%d" % os.getpid())
            while True:
                pass
        os._exit(0)
    os.waitpid(child, 0)
    return torch.full_like(x, int(os.read(read, 20)))


def normalized_up_to_a_factor(x: Tensor, shape: Any, weight: Any, bias: Any, eps: float) -> tuple[Tensor, ...]:
    """Return the results for other arguments if they are these ones multiplied by a factor, which changes little."""
    key = round(float(x[0, 0] / x[0, 1]), 4)
    if key not in _kept:
        sleep(SLOW_S)
        _kept[key] = torch.native_layer_norm(x, shape, weight, bias, eps)
    mean = x.mean(1, keepdim=True)
    return _kept[key][0].clone(), mean, torch.rsqrt((x - mean).square().mean(1, keepdim=True) + eps)


def forged_answer(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """Write a forged answer with a time of 5 us to the process's pipes, then compute honestly."""
    for name in os.listdir("/proc/self/fd"):
        if "pipe:" in os.path.realpath(f"/proc/self/fd/{name}") and int(name) > 2:
            os.write(int(name), b"[5000, [0, 0]]\n")
    return honest(x, dim, half_to_float)


def argmax(x: Tensor, dim: int) -> Tensor:
    return torch.argmax(x, dim)


_indices: dict[torch.Size, Tensor] = {}


def argmax_kept_by_shape(x: Tensor, dim: int) -> Tensor:
    if x.shape not in _indices:
        _indices[x.shape] = torch.argmax(x, dim)
    return _indices[x.shape].clone()
