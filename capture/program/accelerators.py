"""Accelerators as a capture sees them: it starts none, and asks only those that the program has started."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from threading import Condition
from typing import Any

import torch

from opgrip.capture.program.patches import Patches
from opgrip.capture.torch_compat.torch_private import out_of_tree_device

KINDS = ("cuda", "xpu")
"""Device types of torch's own with streams and events; a backend from outside of torch has another."""

_SAME = nullcontext()


def accelerators() -> tuple[str, ...]:
    """The device types whose operators run beside the host, whether there is such a device or not."""
    outside = out_of_tree_device()
    # not by an attribute: torch looks long for one that it lacks
    return (*KINDS, outside) if outside in vars(torch) else KINDS


def is_started(kind: str) -> bool:
    """Whether this process has started a kind of accelerator; a fork of one that has may not use it, and has not."""
    is_initialized = getattr(getattr(torch, kind, None), "is_initialized", None)
    return is_initialized is not None and bool(is_initialized())


def started_devices() -> list[str]:
    """The devices of the kinds that this process has started."""
    devices: list[str] = []
    with suppress(Exception):
        for kind in filter(is_started, accelerators()):
            devices += [f"{kind}:{index}" for index in range(getattr(torch, kind).device_count())]
    return devices


def accelerator_of(tensors: Iterable[torch.Tensor], values: Iterable[Any] = ()) -> torch.device | None:
    """The accelerator that a call gives work to, with no index where the call names none; None where it gives none.

    Parameters
    ----------
    values : arguments that are no tensors, of which one may name a device
    """
    devices = [tensor.device for tensor in tensors]
    devices += [value for value in values if isinstance(value, torch.device)]
    kinds = accelerators()
    device = next((device for device in devices if device.type in kinds), None)
    return None if device is None or not is_started(device.type) else device


def with_index(device: torch.device) -> torch.device:
    """A device; for one without an index, that of its kind which this thread uses now."""
    index: int | None = device.index
    if index is not None:
        return device
    return torch.device(device.type, int(getattr(torch, device.type).current_device()))


def current_stream(device: torch.device) -> Any:
    """The stream that this thread gives a device work in."""
    return getattr(torch, device.type).current_stream(device)


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """A block in which this thread uses a device.

    An event that is asked or recorded while another is the thread's gives that one a context, which takes memory.
    """
    module = getattr(torch, device.type)
    if module.current_device() == device.index:
        return _SAME
    other: AbstractContextManager[Any] = module.device(device)
    return other


def synchronize(device: torch.device) -> None:
    """Wait for all that a device was given."""
    getattr(torch, device.type).synchronize(device)


def is_capturing(kind: str) -> bool:
    """Whether this thread's stream keeps work for a graph instead of running it."""
    asks = getattr(getattr(torch, kind), "is_current_stream_capturing", None)
    return asks is not None and bool(asks())


def describe_devices() -> dict[str, str]:
    """The names of the accelerators of those kinds that the program has started."""
    names: dict[str, str] = {}
    with suppress(Exception):
        for device in started_devices():
            kind, _, index = device.partition(":")
            name_of = getattr(getattr(torch, kind), "get_device_name", lambda index, kind=kind: kind)
            names[device] = str(name_of(int(index)))
    return names


CLASSES = ("CUDAGraph", "XPUGraph", "Graph")
"""What the modules of accelerators call theirs; each has `capture_begin` and `capture_end`."""


class GraphCaptures:
    """Lets the recording ask devices between the program's captures of graphs, and these begin between questions."""

    def __init__(self) -> None:
        self._patches = Patches()
        self.forget()

    def forget(self) -> None:
        """Begin with no capture and no question, as a forked process does, of whose threads this one alone is left."""
        self._changed = Condition()
        self._ongoing = self._questions = 0

    def __enter__(self) -> GraphCaptures:
        for kind in accelerators():
            for name in CLASSES:
                graph = getattr(getattr(torch, kind, None), name, None)
                if hasattr(graph, "capture_begin") and hasattr(graph, "capture_end"):
                    self._patches.replace(graph, "capture_begin", self._beginning)
                    self._patches.replace(graph, "capture_end", self._ending)
        return self

    def __exit__(self, *ignored: object) -> None:
        self._patches.undo()

    @property
    def is_ongoing(self) -> bool:
        """Whether the program captures one now."""
        return self._ongoing > 0

    @contextmanager
    def question(self) -> Iterator[bool]:
        """A block in which devices may be asked, and no capture begins; yields False where one is under way."""
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
            # one that began before this was watching is not counted
            self._ongoing = max(0, self._ongoing - 1)
