"""Measure the speed-up of several workers that wait for devices and not for each other."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Sequence
from pathlib import Path

from engines import make_trace, rate, with_mode

from figures.figure import Experiment, Figure, NotMeasuredError, Rounds

WORKERS = 4
CASES = 48
TOGETHER = Figure(
    "engines: four workers over one",
    "cases a second of work that waits, with four workers of Ray, over those with one",
    larger_is_better=True,
)


def measure_workers(rounds: int) -> Sequence[Rounds]:
    """Return the cases per second with four workers, and with one."""
    if importlib.util.find_spec("ray") is None:
        raise NotMeasuredError("Ray is not installed: make runtimes")
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "waits.jsonl"
        make_trace(trace, CASES)
        environment = with_mode(Path(folder))
        rates = [[rate(trace, "waits", workers, environment)[0] for workers in (WORKERS, 1)] for _ in range(rounds)]
    return [[(together, alone) for together, alone in rates]]


ENGINES = (Experiment("engines", (TOGETHER,), measure_workers, rounds=2),)
