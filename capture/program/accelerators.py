"""Accelerators that the recorded program uses; a capture starts none itself."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from threading import Condition
from typing import Any

import torch

from opgrip.capture.program.patches import Patches
from opgrip.capture.torch_compat.torch_private import out_of_tree_device, stream_queries

KINDS = ("cuda", "xpu")  # torch's own device types with streams and events; a backend outside torch adds another

_SAME = nullcontext()


def accelerators() -> tuple[str, ...]:
    """Return the types of accelerators that captures support, such as `cuda`."""
    outside = out_of_tree_device()
    # do not use getattr: torch takes long to search for a missing attribute
    return (*KINDS, outside) if outside in vars(torch) else KINDS


def is_started(kind: str) -> bool:
    is_initialized = getattr(getattr(torch, kind, None), "is_initialized", None)
    return is_initialized is not None and bool(is_initialized())


def started_devices() -> list[str]:
    devices: list[str] = []
    with suppress(Exception):
        for kind in filter(is_started, accelerators()):
            devices += [f"{kind}:{index}" for index in range(getattr(torch, kind).device_count())]
    return devices


def accelerator_of(tensors: Iterable[torch.Tensor], values: Iterable[Any] = ()) -> torch.device | None:
    devices = [tensor.device for tensor in tensors]
    devices += [value for value in values if isinstance(value, torch.device)]
    kinds = accelerators()
    device = next((device for device in devices if device.type in kinds), None)
    return None if device is None or not is_started(device.type) else device


def with_index(device: torch.device) -> torch.device:
    index: int | None = device.index
    if index is not None:
        return device
    return torch.device(device.type, int(getattr(torch, device.type).current_device()))


def current_stream(device: torch.device) -> Any:
    return getattr(torch, device.type).current_stream(device)


def new_stream(device: torch.device) -> Any:
    return getattr(torch, device.type).Stream(device)


_own = threading.local()


@contextmanager
def in_stream(stream: Any) -> Iterator[None]:
    """Use `stream` as this thread's current stream in the `with` block."""
    _own.is_active = True
    try:
        with getattr(torch, stream.device.type).stream(stream):
            yield
    finally:
        _own.is_active = False


def is_own_stream() -> bool:
    return getattr(_own, "is_active", False)


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    module = getattr(torch, device.type)
    if module.current_device() == device.index:
        return _SAME
    other: AbstractContextManager[Any] = module.device(device)
    return other


def record_on(device: torch.device, event: Any = None) -> Any:
    """Record an event, by default a new one, in this thread's current stream on a device; return the event."""
    event = event or torch.Event(device=device)
    with on_device(device):
        event.record(current_stream(device))
    return event


def synchronize(device: torch.device) -> None:
    getattr(torch, device.type).synchronize(device)


def is_capturing(kind: str) -> bool:
    """Return True if this thread's current stream captures work for a CUDA or HIP graph instead of running it."""
    asks = getattr(getattr(torch, kind), "is_current_stream_capturing", None)
    return asks is not None and bool(asks())


@dataclass(frozen=True, slots=True)
class DeviceQueries:
    is_capturing: Callable[[], bool]
    current_device: Callable[[], int]
    stream_handle: Callable[[int], int]


@functools.cache
def queries_of(kind: str) -> DeviceQueries:
    module = getattr(torch, kind)

    def handle_of_stream(index: int) -> int:
        return int(getattr(module.current_stream(index), "stream_id", 0))

    private = stream_queries(kind)
    return DeviceQueries(
        private.get("is_capturing", getattr(module, "is_current_stream_capturing", bool)),
        private.get("current_device", module.current_device),
        private.get("stream_handle", handle_of_stream),
    )


def describe_devices() -> dict[str, str]:
    names: dict[str, str] = {}
    with suppress(Exception):
        for device in started_devices():
            kind, _, index = device.partition(":")
            name_of = getattr(getattr(torch, kind), "get_device_name", lambda index, kind=kind: kind)
            names[device] = str(name_of(int(index)))
    return names


CLASSES = ("CUDAGraph", "XPUGraph", "Graph")  # names of graph classes in the accelerators' modules


def graph_classes() -> Iterator[tuple[str, Any]]:
    for kind in accelerators():
        for name in CLASSES:
            graph = getattr(getattr(torch, kind, None), name, None)
            if hasattr(graph, "capture_begin") and hasattr(graph, "capture_end"):
                yield kind, graph


class GraphCaptures:
    """Prevents queries of a device while the program captures a CUDA or HIP graph, because they would fail."""

    def __init__(self) -> None:
        self._patches = Patches()
        self.forget()

    def forget(self) -> None:
        self._changed = Condition()
        self._ongoing = self._questions = 0

    def __enter__(self) -> GraphCaptures:
        for _, graph in graph_classes():
            self._patches.replace(graph, "capture_begin", self._beginning)
            self._patches.replace(graph, "capture_end", self._ending)
        return self

    def __exit__(self, *ignored: object) -> None:
        self._patches.undo()

    @property
    def is_ongoing(self) -> bool:
        return self._ongoing > 0

    @contextmanager
    def question(self) -> Iterator[bool]:
        """Yield True if the block may query a device; graph captures then wait until the block ends."""
        with self._changed:
            may_ask = self._ongoing == 0
            self._questions += may_ask
        try:
            yield may_ask
        finally:
            with self._changed:
                self._questions -= may_ask
                self._changed.notify_all()

    def _beginning(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def capture_begin(*args: Any, **kwargs: Any) -> Any:
            with self._changed:
                self._changed.wait_for(lambda: not self._questions)
                self._ongoing += 1
            try:
                return original(*args, **kwargs)
            except BaseException:
                self._end()
                raise

        return capture_begin

    def _ending(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def capture_end(*args: Any, **kwargs: Any) -> Any:
            try:
                return original(*args, **kwargs)
            finally:
                self._end()

        return capture_end

    def _end(self) -> None:
        with self._changed:
            # a capture that began before `__enter__` was not counted
            self._ongoing = max(0, self._ongoing - 1)
