"""Module of the device, `torch.sim`, with the functions that torch and programs expect, and controls for tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from sim_accelerator.extension import load_extension

_extension = load_extension()
L2_CACHE_BYTES = 1 << 20
NS_PER_CYCLE = 0.5  # duration of a cycle of `_sleep`

Device = torch.device | str | int | None

set_duration = _extension.set_duration  # set the duration of an operator such as `aten::mm` in us
set_default_duration = _extension.set_default_duration  # set the duration of all other operators
# Let the next call of an operator fail with a message. The next wait and all later uses of the device raise it.
fail = _extension.fail
# Set the operations that captures forbid this thread, `global`, `thread_local` or `relaxed`, and return the old value.
exchange_capture_mode = _extension.exchange_capture_mode

device_count = _extension.device_count
is_initialized = _extension.is_initialized
has_context = _extension.has_context  # return True if this process has used a device by its index
_is_in_bad_fork = _extension.in_bad_fork


def is_available() -> bool:
    return bool(device_count() > 0)


def init() -> None:
    _extension.initialize()


def _lazy_init() -> None:
    """Do nothing: `_accelerator_synchronizeDevice` of torch 2.11 waits only for devices with this function."""


def current_device() -> int:
    return torch._C._accelerator_getDeviceIndex()


def set_device(device: Device) -> None:
    torch._C._accelerator_setDeviceIndex(_index(device))
    _extension.use(current_device())


def synchronize(device: Device = None) -> None:
    torch._C._accelerator_synchronizeDevice(_index(device))


def current_stream(device: Device = None) -> Stream:
    now = torch._C._accelerator_getStream(_index(device))
    return Stream.numbered(now.stream_id, now.device_index, now.device_type)


def default_stream(device: Device = None) -> Stream:
    return Stream.numbered(0, _index(device), current_stream(device).device_type)


def set_stream(stream: torch.Stream) -> None:
    torch._C._accelerator_setStream(stream)


@contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    """Make a stream the current one, and its device the current device."""
    if stream is None:
        yield
        return
    device, replaced = current_device(), current_stream(stream.device)
    set_stream(stream)
    try:
        yield
    finally:
        set_stream(replaced)
        torch._C._accelerator_setDeviceIndex(device)


class device:
    """Context manager that makes a device the current one."""

    def __init__(self, device: Device) -> None:
        self._index = _index(device)

    def __enter__(self) -> None:
        self._before = current_device()
        set_device(self._index)

    def __exit__(self, *error: object) -> None:
        # like CUDA's, it creates no context on a device without one
        torch._C._accelerator_setDeviceIndex(self._before)


class Stream(torch.Stream):
    def __new__(cls, device: Device = None, priority: int = 0) -> Stream:
        made: Stream = super().__new__(cls, f"sim:{_index(device)}", priority=priority)
        return made

    @classmethod
    def numbered(cls, number: int, device: int, kind: int) -> Stream:
        """Return an object of this class, as the module of CUDA does, for an existing stream."""
        made: Stream = super().__new__(cls, stream_id=number, device_index=device, device_type=kind)
        return made


def Event(enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> torch.Event:
    """Return a generic event, since torch measures times only between events of one class."""
    return torch.Event("sim", enable_timing=enable_timing)


def _sleep(cycles: int) -> None:
    """Keep the current stream busy for a number of cycles, as `torch.cuda._sleep` does."""
    now = current_stream()
    _extension.sleep(now.device_index, now.stream_id, round(cycles * NS_PER_CYCLE))


def is_current_stream_capturing() -> bool:
    if not Graph._is_capturing or not is_initialized():
        return False
    now = current_stream()
    return bool(_extension.is_capturing(now.device_index, now.stream_id))


class Graph:
    """Recorded calls that can be replayed.

    With `SIM_ONE_FAILED_CAPTURE`, no capture is possible after a failed one, as up to torch 2.11.
    """

    _is_capturing = False

    def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
        if Graph._is_capturing and "SIM_ONE_FAILED_CAPTURE" in os.environ:
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")
        now = current_stream()
        self._capture = _extension.begin_capture(now.device_index, now.stream_id, capture_error_mode)
        Graph._is_capturing = True

    def capture_end(self) -> None:
        _extension.end_capture(self._capture)
        Graph._is_capturing = False

    def replay(self) -> None:
        _extension.replay(self._capture)


class graph:
    """Context manager that captures its block in a separate stream.

    If the capture fails, it does not restore the previous stream, like torch.cuda.graph.
    """

    def __init__(self, graph: Graph, capture_error_mode: str = "global") -> None:
        self._graph, self._mode = graph, capture_error_mode

    def __enter__(self) -> None:
        synchronize()
        self._replaced = current_stream()
        set_stream(Stream())
        self._graph.capture_begin(capture_error_mode=self._mode)

    def __exit__(self, *error: Any) -> None:
        self._graph.capture_end()
        set_stream(self._replaced)


def memory_allocated(device: Device = None) -> int:
    return _memory(device)["allocated"]


def max_memory_allocated(device: Device = None) -> int:
    return _memory(device)["peak"]


def memory_reserved(device: Device = None) -> int:
    return _memory(device)["reserved"]


def max_memory_reserved(device: Device = None) -> int:
    return _memory(device)["reserved_peak"]


def memory_stats(device: Device = None) -> dict[str, int]:
    now = _memory(device)
    return {
        "allocated_bytes.all.current": now["allocated"],
        "allocated_bytes.all.peak": now["peak"],
        "reserved_bytes.all.current": now["reserved"],
        "reserved_bytes.all.peak": now["reserved_peak"],
        "allocation.all.allocated": now["allocations"],
    }


def reset_peak_memory_stats(device: Device = None) -> None:
    _extension.reset_peak(_index(device))


def empty_cache() -> None:
    for index in range(device_count()):
        _extension.empty_cache(index)


def mem_get_info(device: Device = None) -> tuple[int, int]:
    _extension.use(_index(device))
    now = _memory(device)
    return now["total"] - now["allocated"], now["total"]


def set_per_process_memory_fraction(fraction: float, device: Device = None) -> None:
    """Limit this process's memory; the device needs an index, as in torch.cuda."""
    if device is not None and not isinstance(device, int) and torch.device(device).index is None:
        raise ValueError(f"Expected a torch.device with a specified index or an integer, but got:{device}")
    _extension.use(_index(device))
    _extension.limit_memory(_index(device), fraction)


def get_device_name(device: Device = None) -> str:
    return get_device_properties(device).name


def get_device_capability(device: Device = None) -> tuple[int, int]:
    _extension.initialize()
    return 1, 0


def get_device_properties(device: Device = None) -> Any:
    """Return the properties of a device; asking starts the driver, as with CUDA."""
    _extension.initialize()
    index = _index(device)
    physical = _extension.physical_index(index)
    names = os.environ.get("SIM_NAMES", "").split(";")
    return SimpleNamespace(
        name=names[physical] if physical < len(names) and names[physical] else "Simulated accelerator",
        uuid=f"sim-{physical}",
        total_memory=_memory(index)["total"],
        L2_cache_size=L2_CACHE_BYTES,
        multi_processor_count=1,
    )


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


def get_rng_state(device: Device = None) -> torch.Tensor:
    return _generator(device).get_state()


def set_rng_state(state: torch.Tensor, device: Device = None) -> None:
    _generator(device).set_state(state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state_all(states: list[torch.Tensor]) -> None:
    for index, state in enumerate(states):
        set_rng_state(state, index)


def manual_seed(seed: int) -> None:
    _extension.default_generator(current_device()).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seed all devices without creating a context."""
    for index in range(device_count()):
        _extension.default_generator(index).manual_seed(seed)


def initial_seed() -> int:
    return int(_generator(None).initial_seed())


def _generator(device: Device) -> torch.Generator:
    _extension.use(_index(device))
    generator: torch.Generator = _extension.default_generator(_index(device))
    return generator


def _memory(device: Device) -> dict[str, int]:
    memory: dict[str, int] = _extension.memory(_index(device))
    return memory


def _index(device: Device) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return current_device() if index is None else index
