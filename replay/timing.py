"""Measures how long a call takes."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

import numpy as np
import torch

BUDGET_NS = 100_000_000
"""Time that a case is given where the number of its runs is not."""
FEWEST, MOST = 3, 100
"""Runs within that budget."""

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Timing:
    """Durations of a call's runs.

    Attributes
    ----------
    times_ns : one a run, in the order in which they were run
    """

    times_ns: tuple[int, ...]

    def quantile_us(self, share: float) -> float:
        """The duration that this share of the runs stayed under, in microseconds."""
        return float(np.quantile(self.times_ns, share)) / 1e3


@dataclass(frozen=True, slots=True)
class Effort:
    """How often a case is run.

    Attributes
    ----------
    warmup : runs before the first that is timed
    iterations : timed runs; None for as many as fit the case's budget, 3 to 100
    """

    warmup: int = 2
    iterations: int | None = None


def synchronizer(device: str) -> Callable[[], None]:
    """What waits for all work on a device."""
    kind = torch.device(device).type
    if kind == "cpu":
        return lambda: None
    module = getattr(torch, kind)
    return lambda: module.synchronize(device)


def measure(
    function: Callable[..., Any],
    arguments: Callable[[], Arguments],
    synchronize: Callable[[], None],
    effort: Effort,
) -> Timing:
    """Time a function, each run alone, from its call until its work is done.

    Parameters
    ----------
    arguments : gives those of the next run, outside of its time
    """
    times: list[int] = []
    with _no_garbage_collection():
        for _ in range(effort.warmup):
            _run_once(function, arguments, synchronize)
        started = perf_counter_ns()
        while _wants_more(times, perf_counter_ns() - started, effort):
            times.append(_run_once(function, arguments, synchronize))
    return Timing(tuple(times))


def _run_once(function: Callable[..., Any], arguments: Callable[[], Arguments], synchronize: Callable[[], None]) -> int:
    args, kwargs = arguments()
    synchronize()
    start = perf_counter_ns()
    function(*args, **kwargs)
    synchronize()
    return perf_counter_ns() - start


def _wants_more(times: list[int], spent_ns: int, effort: Effort) -> bool:
    if effort.iterations is not None:
        return len(times) < effort.iterations
    return len(times) < FEWEST or (len(times) < MOST and spent_ns < BUDGET_NS)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
