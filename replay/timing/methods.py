"""Ways to time a run: each alone, many at once, or by the device's own clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opgrip.replay.operators.calling import Arguments, Function

if TYPE_CHECKING:
    from opgrip.replay.timing.ranges import Range

DISCRETE, CONTINUOUS, EVENTS, GRAPH = "discrete", "continuous", "events", "graph"
METHODS = (DISCRETE, CONTINUOUS, EVENTS, GRAPH)
ON_DEVICE = (EVENTS, GRAPH)
"""Methods that need an accelerator's own clock."""

BLOCK_NS = 400_000
"""Time of a block of runs that are timed as one: reading the clock is then a ten-thousandth of it."""
MOST_IN_BLOCK = 10_000


def synchronizer(device: str) -> Callable[[], None]:
    """What waits for all work on a device."""
    import torch

    kind = torch.device(device).type
    if kind == "cpu":
        return lambda: None
    module = getattr(torch, kind)
    return lambda: module.synchronize(device)


@dataclass(frozen=True, slots=True)
class Stopwatch:
    """Times runs on a device.

    Attributes
    ----------
    method : one of `METHODS`
    synchronize : waits for the device
    empty_ns : what a timed section takes with nothing in it
    """

    method: str
    synchronize: Callable[[], None]
    empty_ns: float

    def time(self, function: Function, runs: Sequence[Arguments], span: Range) -> float:
        """Time of one run in ns: the mean of those in `runs`, which are timed together where they are several.

        Parameters
        ----------
        span : is entered and left just outside of the clock's readings
        """
        if self.method in ON_DEVICE:
            by_device = _by_events if self.method == EVENTS else _by_graph
            return by_device(function, runs, span)
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


def block_size(time_ns: float) -> int:
    """How many runs of so many ns make a block whose time hides that of the clock."""
    return max(1, min(MOST_IN_BLOCK, round(BLOCK_NS / max(time_ns, 1.0))))


def _by_events(function: Function, runs: Sequence[Arguments], span: Range) -> float:
    import torch

    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    span.begin()
    before.record()
    for args, kwargs in runs:
        function(*args, **kwargs)
    after.record()
    after.synchronize()
    span.end()
    return float(before.elapsed_time(after)) * 1e6 / len(runs)


def _by_graph(function: Function, runs: Sequence[Arguments], span: Range) -> float:
    """The runs as one CUDA graph: what is left of a call when nothing is launched from Python."""
    import torch

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for args, kwargs in runs:
            function(*args, **kwargs)
    # the first replay uploads the graph
    graph.replay()
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    span.begin()
    before.record()
    graph.replay()
    after.record()
    after.synchronize()
    span.end()
    return float(before.elapsed_time(after)) * 1e6 / len(runs)
