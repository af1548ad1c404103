"""Time the calls of one pass over a sequence: by the host's clock, or by that of the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import perf_counter_ns
from typing import Any, Protocol

import numpy as np
import torch

from opgrip.replay.cases.fresh import NewMemory
from opgrip.replay.operators.devices import current_stream, delay, make_event, synchronizer
from opgrip.replay.operators.memory import Function, tensors_in
from opgrip.replay.timing import pages
from opgrip.replay.timing.stopwatch import MOST_LEAD_NS

LAUNCH_NS = 20_000
"""What two events around a launch add to it at most."""


class Watch(Protocol):
    """Runs the calls of one pass, in their order.

    Attributes
    ----------
    on_device : places of the calls that the device's clock timed
    """

    on_device: list[int]

    def run(self, function: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run a call; gives its result."""

    def skip(self) -> None:
        """Take note of a call that is not run."""

    def times_ns(self) -> list[int]:
        """The time of each call in ns, 0 for one that was not run."""


class HostWatch:
    """By the host's clock; on an accelerator, that is how long launches take.

    Parameters
    ----------
    new_memory : by the places of calls, in which memory their results shall come
    """

    def __init__(self, new_memory: Mapping[int, NewMemory]) -> None:
        self.on_device: list[int] = []
        self._times: list[int] = []
        self._new_memory = new_memory

    def run(self, function: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:  # noqa: D102
        memory = self._new_memory.get(len(self._times))
        if memory is not None:
            pages.arrange(memory.sizes, memory.fresh_bytes)
        if isinstance(function, torch._ops.OpOverload):
            # what a capture calls: the operator without its layer in Python
            function = function._op
        start = perf_counter_ns()
        result = function(*args, **kwargs)
        self._times.append(perf_counter_ns() - start)
        return result

    def skip(self) -> None:  # noqa: D102
        self._times.append(0)

    def times_ns(self) -> list[int]:  # noqa: D102
        return self._times


class DeviceWatch:
    """By an accelerator's clock, for calls that work on it; the others by the host's.

    The accelerator is kept busy before each call until the host has launched it: a shorter one would else seem to take
    as long as its launch.

    Parameters
    ----------
    host_ns : what each call took on the host in earlier passes
    """

    def __init__(self, device: str, host_ns: Sequence[float]) -> None:
        self._device = device
        self._stream = current_stream(device)
        self._host_ns = host_ns
        self._times: list[int] = []
        self._events: list[tuple[Any, Any]] = []
        self.on_device: list[int] = []

    def run(self, function: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:  # noqa: D102
        before, after = make_event(self._device), make_event(self._device)
        delay(self._device, min(self._host_ns[len(self._times)] + LAUNCH_NS, MOST_LEAD_NS) / 1e3)
        before.record(self._stream)
        start = perf_counter_ns()
        result = function(*args, **kwargs)
        spent = perf_counter_ns() - start
        after.record(self._stream)
        kind = torch.device(self._device).type
        if any(tensor.device.type == kind for tensor in tensors_in([list(args), kwargs, result])):
            self.on_device.append(len(self._times))
            self._events.append((before, after))
        self._times.append(spent)
        return result

    def skip(self) -> None:  # noqa: D102
        self._times.append(0)

    def times_ns(self) -> list[int]:  # noqa: D102
        synchronizer(self._device)()
        for place, (before, after) in zip(self.on_device, self._events, strict=False):
            self._times[place] = round(before.elapsed_time(after) * 1e6)
        self._events.clear()
        return self._times


def typical_ns(passes: Sequence[Sequence[int]]) -> list[float]:
    """The median time of each call over all passes in ns."""
    medians: list[float] = np.median(np.array(passes, dtype=np.float64), axis=0).tolist()
    return medians
