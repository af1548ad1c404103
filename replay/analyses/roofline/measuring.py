"""Measures a machine's ceilings: the best of several runs, since a ceiling is what nothing exceeds."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import Any

import torch

from opgrip.replay.timing.methods import synchronizer
from opgrip.traces.ceilings.ceilings import Ceilings
from opgrip.traces.ceilings.copying import best_s, levels, no_less
from opgrip.traces.machine import processor
from opgrip.traces.names import plain_name
from opgrip.traces.progress import Tell, tell_nobody

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8)
SIZES = (256, 512, 1024, 2048, 4096, 8192)
"""Rows and columns of the matrices whose product is timed."""
LONGEST_S = 0.12
"""A product that takes longer is not tried any larger."""
LAUNCHES = 2000


def measure(device: str, tell: Tell = tell_nobody) -> Ceilings:
    """The ceilings of this machine, or of one of its GPUs; `tell` is told how far it is.

    On the CPU one thread is measured, and one a processor. Takes about 20 seconds.
    """
    kind = torch.device(device).type
    threads = sorted({1, len(os.sched_getaffinity(0))}) if kind == "cpu" else [1]
    rates: dict[str, dict[int, float]] = {}
    parts = len(threads) * len(DTYPES) + 1
    for place, count in enumerate(threads):
        with _threads(count):
            for number, dtype in enumerate(DTYPES, place * len(DTYPES)):
                tell(f"products of {plain_name(dtype)}", number, parts)
                rate = _matrix_rate(dtype, device)
                if rate is not None:
                    rates.setdefault(plain_name(dtype), {})[count] = rate
    tell("copies", parts - 1, parts)
    one = torch.zeros(1, device=device)
    return Ceilings(
        machine=tuple(processor(device)),
        device=kind,
        threads=threads[-1],
        levels=tuple(levels(device, threads)),
        rates={dtype: no_less(rate_by_threads) for dtype, rate_by_threads in rates.items()},
        launch_us=_launch_us(torch.ops.aten.neg.default, one, device),
        dispatch_us=_launch_us(torch.ops.aten.alias.default, one, device),
        torch=torch.__version__,
        time=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


def _matrix_rate(dtype: torch.dtype, device: str) -> float | None:
    """Gflop/s of the quickest product; None where there is none in this dtype."""
    best = None
    wait = synchronizer(device)
    function = torch._int_mm if dtype is torch.int8 else torch.mm
    for size in SIZES:
        try:
            # small numbers, of which no dtype makes infinities or subnormals
            first, second = (torch.ones(size, size, device=device).to(dtype) for _ in range(2))

            def run(first: torch.Tensor = first, second: torch.Tensor = second) -> None:
                function(first, second)
                wait()

            time_s = best_s(run, LONGEST_S)
        except (RuntimeError, MemoryError):
            break
        best = max(best or 0.0, 2 * size**3 / time_s / 1e9)
        if time_s * 8 > LONGEST_S:
            break
    return best


def _launch_us(function: Callable[..., Any], one: torch.Tensor, device: str) -> float:
    """Time of a run of many, none of which is waited for."""
    wait = synchronizer(device)

    def run() -> None:
        for _ in range(LAUNCHES):
            function(one)
        wait()

    return best_s(run) / LAUNCHES * 1e6


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
