"""Clocks: when and how long a call ran, on the host or by a device's events."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

import numpy as np

from opgrip.errors import one_line
from opgrip.replay.operators.devices import (
    DeviceLostError,
    current_stream,
    delay,
    make_event,
    module_of,
    without_waiting,
)
from opgrip.replay.operators.lookup import Unsupported
from opgrip.replay.operators.memory import Arguments, Function
from opgrip.replay.timing.ranges import Range
from opgrip.replay.timing.timing_options import EVENTS

PROBE = bytes(range(256)) * 64
"""A checksum of this takes some microseconds, always the same work on data that stays in the nearest cache."""
SLOWED = 4 / 3
"""A probe that takes so much longer than the quickest means that the processor was slowed down or taken away."""


MEMORY_BYTES, MEMORY_READS = 8 << 20, 3
"""Bytes that the memory probe reads, more than the caches of a core hold, and how often it does: it takes 1 ms."""
MEMORY_EVERY_NS = 500_000_000
"""Least time between two memory probes."""


def empty_call_ns(wait: Callable[[], None] = lambda: None, count: int = 200) -> float:
    """What a timed section takes beside the call in it, in ns: reading the clock twice.

    Parameters
    ----------
    wait : for a device that has nothing to do
    """
    times = []
    for _ in range(count):
        start = perf_counter_ns()
        wait()
        times.append(perf_counter_ns() - start)
    return float(np.median(times))


class Pace:
    """Tells whether the processor runs as fast as it did at its best."""

    def __init__(self) -> None:
        self._best = min(_probe_ns() for _ in range(50))

    def is_slowed(self) -> bool:
        """Whether it is slower now by a quarter or more. The better of two probes counts: one may be interrupted."""
        first = _probe_ns()
        probe_ns = first if first <= self._best * SLOWED else min(first, _probe_ns())
        self._best = min(self._best, probe_ns)
        return probe_ns > self._best * SLOWED


class MemoryPace:
    """Measures now and then how fast this thread reads memory, which programs and virtual machines share."""

    def __init__(self) -> None:
        self._data = np.ones(MEMORY_BYTES // 8, dtype=np.float64)
        self._read_ns, self._gb_per_s = 0, 0.0

    def gb_per_s(self) -> float:
        """Return the rate of the last probe, in GB/s; make a new one if that was some time ago."""
        if perf_counter_ns() - self._read_ns > MEMORY_EVERY_NS:
            times = []
            for _ in range(MEMORY_READS):
                start = perf_counter_ns()
                self._data.sum()
                times.append(perf_counter_ns() - start)
            self._read_ns, self._gb_per_s = perf_counter_ns(), MEMORY_BYTES / float(np.median(times))
        return self._gb_per_s


def _probe_ns() -> int:
    start = perf_counter_ns()
    zlib.crc32(PROBE)
    return perf_counter_ns() - start


BLOCK_NS = 400_000
"""Time of a block of runs that are timed as one: reading the clock is then a ten-thousandth of it."""
MOST_IN_BLOCK = 10_000
MOST_LEAD_NS = 5_000_000
"""Time that a device is kept busy at most, so that the host gets ahead of it."""
GRAPHS = ("CUDAGraph", "XPUGraph", "Graph")
"""What the modules of accelerators call theirs."""


@dataclass(slots=True)
class Stopwatch:
    """Times runs on a device.

    Attributes
    ----------
    method : one of `METHODS`
    synchronize : waits for the device
    empty_ns : what a timed section takes with nothing in it
    device : whose clock is read, by those methods that read one
    launch_ns : what the host took to give the last runs to the device
    """

    method: str
    synchronize: Callable[[], None]
    empty_ns: float
    device: str = "cpu"
    launch_ns: float = 0.0

    def time(self, function: Function, runs: Sequence[Arguments], span: Range, lead_ns: float = 0.0) -> float:
        """Time of one run in ns: the mean of those in `runs`, which are timed together where they are several.

        Parameters
        ----------
        span : is entered and left just outside of the clock's readings
        lead_ns : how long the device is busy before, where its own clock is read: it then waits for no launch, as long
            as which a shorter call would seem to take
        """
        if self.method == EVENTS:

            def launch() -> None:
                for args, kwargs in runs:
                    function(*args, **kwargs)

            return self._by_events(launch, span, lead_ns) / len(runs)
        self.synchronize()
        span.begin()
        if len(runs) == 1:
            args, kwargs = runs[0]
            start = perf_counter_ns()
            result = function(*args, **kwargs)
            self.synchronize()
            elapsed_ns = perf_counter_ns() - start
            span.end()
            # freeing the result is not the call's work
            del result
        else:
            start = perf_counter_ns()
            for args, kwargs in runs:
                function(*args, **kwargs)
            self.synchronize()
            elapsed_ns = perf_counter_ns() - start
            span.end()
        return max(elapsed_ns - self.empty_ns, 0.0) / len(runs)

    def capture(self, function: Function, runs: Sequence[Arguments]) -> Any:
        """The runs as one graph of the device, which has been replayed once, for that uploads it.

        Raises
        ------
        Unsupported : for a call that waits for the device, which a graph cannot hold
        DeviceLostError : where the capture fails all the same, which spoils those that follow in this process
        """
        module = module_of(self.device)
        kinds = [getattr(module, name) for name in GRAPHS if hasattr(module, name)]
        if not kinds:
            raise Unsupported(f"{self.device} has no graphs")

        def launch() -> None:
            for args, kwargs in runs:
                function(*args, **kwargs)

        try:
            with without_waiting(self.device):
                launch()
        except RuntimeError as error:
            raise Unsupported(f"it waits for the device, which a graph cannot hold: {one_line(error)}") from error
        graph = kinds[0]()
        try:
            with module.graph(graph):
                launch()
            graph.replay()
            self.synchronize()
        except Exception as error:
            raise DeviceLostError(f"it cannot be captured as a graph: {one_line(error)}") from error
        return graph

    def time_graph(self, graph: Any, count: int, span: Range) -> float:
        """Time of one run in ns, of so many that a graph holds: what is left of them when Python launches nothing."""
        return self._by_events(graph.replay, span, self.launch_ns) / count

    def _by_events(self, launch: Callable[[], object], span: Range, lead_ns: float) -> float:
        before, after = make_event(self.device), make_event(self.device)
        stream = current_stream(self.device)
        self.synchronize()
        span.begin()
        delay(self.device, min(lead_ns, MOST_LEAD_NS) / 1e3)
        before.record(stream)
        start = perf_counter_ns()
        launch()
        self.launch_ns = perf_counter_ns() - start
        after.record(stream)
        after.synchronize()
        span.end()
        return float(before.elapsed_time(after)) * 1e6


def block_size(time_ns: float) -> int:
    """How many runs of so many ns make a block whose time hides that of the clock."""
    return max(1, min(MOST_IN_BLOCK, round(BLOCK_NS / max(time_ns, 1.0))))
