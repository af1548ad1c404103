"""Clocks for runs: they measure the time of a call on the host, or on the device with events."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from time import perf_counter_ns
from typing import Any, TypeVar

import numpy as np
import torch

from opgrip.errors import one_line
from opgrip.replay.operators.devices import (
    DeviceLostError,
    current_stream,
    delay,
    graph_class,
    make_event,
    module_of,
    without_waiting,
)
from opgrip.replay.operators.lookup import Unsupported
from opgrip.replay.operators.memory import Arguments, Function
from opgrip.replay.timing.ranges import Range
from opgrip.replay.timing.timing_options import EVENTS

T = TypeVar("T")

SMALL = torch.zeros(4, 4)


def empty_call_ns(wait: Callable[[], None] = lambda: None, count: int = 200) -> float:
    """Return the time in ns that reading the clock twice and waiting for an idle device add to a timed run."""
    times = []
    for _ in range(count):
        start = perf_counter_ns()
        wait()
        times.append(perf_counter_ns() - start)
    return float(np.median(times))


BLOCK_NS = 400_000  # duration in ns of a block of runs; reading the clock takes a ten-thousandth of it
MOST_IN_BLOCK = 10_000
# time in ns for which a device is kept busy in addition to the last launch time, and maximum total time
LEAD_MARGIN_NS, MOST_LEAD_NS = 20_000, 5_000_000
# number of consecutive launches that may outlast the busy time, and number of runs after which a longer busy time is
# tried again
TRIED, RETRIED = 2, 8


def keep_busy(device: str, launch_ns: float) -> None:
    delay(device, min(launch_ns + LEAD_MARGIN_NS, MOST_LEAD_NS) / 1e3)


@dataclass(slots=True)
class LaunchTime:
    """Times of the launches of a call.

    ns : expected time of the next launch; 0 if unknown
    """

    ns: float = 0.0
    last_ns: float = 0.0
    count: int = 0
    outlasting: int = 0
    _in_a_row: int = 0
    _least_ns: float = float("inf")

    def add(self, launch_ns: float, outlasts: bool) -> None:
        self.last_ns = launch_ns
        self.count += 1
        self.outlasting += outlasts
        self._least_ns = min(self._least_ns, launch_ns)
        self._in_a_row = self._in_a_row + 1 if outlasts else 0
        is_tried = self._in_a_row <= TRIED or self._in_a_row % RETRIED == 0
        self.ns = launch_ns if is_tried else self._least_ns

    @property
    def is_waited_for(self) -> bool:
        return self.outlasting * 2 > self.count


@dataclass(slots=True)
class Stopwatch:
    """A clock that times runs on a device.

    empty_ns : time in ns that measuring an empty run takes; it is subtracted from times by the host's clock
    result : result of the last timed call, which was not in a graph
    """

    method: str
    synchronize: Callable[[], None]
    empty_ns: float
    device: str = "cpu"
    result: Any = field(init=False, default=None)
    _events: tuple[Any, Any] | None = field(init=False, default=None)

    def time(
        self, function: Function, runs: Sequence[Arguments], span: Range, launch: LaunchTime, graph: Any = None
    ) -> float:
        """Return the time of one run in ns: the mean over `runs`, which are timed together."""
        self.result = None
        if graph is not None:
            return self._by_events(graph.replay, span, launch) / len(runs)
        if self.method == EVENTS:
            return self._by_events(partial(_run_all, function, runs), span, launch) / len(runs)
        self.synchronize()
        span.begin()
        if len(runs) == 1:
            args, kwargs = runs[0]
            _handle(args)
            start = perf_counter_ns()
            result = function(*args, **kwargs)
            self.synchronize()
            elapsed_ns = perf_counter_ns() - start
        else:
            start = perf_counter_ns()
            result = _run_all(function, runs)
            self.synchronize()
            elapsed_ns = perf_counter_ns() - start
        span.end()
        # freeing the result is not timed
        self.result = result
        return max(elapsed_ns - self.empty_ns, 0.0) / len(runs)

    def capture(self, function: Function, runs: Sequence[Arguments]) -> Any:
        """Capture the runs as a CUDA graph, replay it once to upload it to the device, and return it."""
        module = module_of(self.device)
        kind = graph_class(self.device)
        if kind is None:
            raise Unsupported(f"{self.device} does not support CUDA graphs")
        try:
            with without_waiting(self.device):
                _run_all(function, runs)
        except RuntimeError as error:
            raise Unsupported(f"the call waits for the device, which a CUDA graph cannot: {one_line(error)}") from error
        graph = kind()
        try:
            with module.graph(graph):
                _run_all(function, runs)
            graph.replay()
            self.synchronize()
        except Exception as error:
            raise DeviceLostError(f"the call cannot be captured as a CUDA graph: {one_line(error)}") from error
        return graph

    def _by_events(self, run: Callable[[], object], span: Range, launch: LaunchTime) -> float:
        if self._events is None:
            self._events = make_event(self.device), make_event(self.device)
        before, after = self._events
        stream = current_stream(self.device)
        self.synchronize()
        span.begin()
        if launch.ns:
            keep_busy(self.device, launch.ns)
        before.record(stream)
        start = perf_counter_ns()
        self.result = run()
        launch_ns = perf_counter_ns() - start
        after.record(stream)
        outlasts = before.query()
        after.synchronize()
        span.end()
        launch.add(launch_ns, outlasts)
        return float(before.elapsed_time(after)) * 1e6


def on_deeper_stack(frames: int, function: Callable[..., T], *args: Any) -> T:
    """Call a function with `frames` more frames on the C stack, and return its result."""
    if frames == 0:
        return function(*args)
    # calls between Python functions may use no C stack, those from C to Python do
    return partial(on_deeper_stack, frames - 1, function, *args)()


def _handle(args: Sequence[Any]) -> None:
    # as a program has just done: it has called another operator, and handled the arguments
    for value in args:
        if isinstance(value, torch.Tensor):
            value.dim()
    torch.ops.aten.add.Tensor(torch.ops.aten.view.default(SMALL, [-1]), 1)


def _run_all(function: Function, runs: Sequence[Arguments]) -> Any:
    for args, kwargs in islice(runs, len(runs) - 1):
        function(*args, **kwargs)
    args, kwargs = runs[-1]
    return function(*args, **kwargs)


def block_size(time_ns: float) -> int:
    """Return how many runs of this duration are timed together, so that reading the clock hardly matters."""
    return max(1, min(MOST_IN_BLOCK, round(BLOCK_NS / max(time_ns, 1.0))))
