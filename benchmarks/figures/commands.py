"""Measure how long a command takes, relative to importing torch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from time import perf_counter

from figures.figure import Experiment, Figure, NotMeasuredError, Rounds
from figures.times import import_seconds, read_times

START = Figure(
    "opreplay: start", "time until the first line of `opreplay --help` over that of a process that imports torch"
)
TIMED_COMMANDS = {"set-up": "make .venv/installed", "test": "make test", "test-all": "make test-all"}


def measure_start(rounds: int) -> list[Rounds]:
    """Return, for each round, the seconds until the help's first line and the seconds of importing torch."""
    first_line_seconds()
    return [[(first_line_seconds(), import_seconds(sys.executable)) for _ in range(rounds)]]


def first_line_seconds() -> float:
    """Return the seconds until the first line of `opreplay --help`."""
    command = [str(Path(sys.executable).parent / "opreplay"), "--help"]
    start = perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        seconds = perf_counter() - start
        process.stdout.read()
    assert line, "opreplay --help prints nothing"
    return seconds


def timed_experiment(name: str) -> Experiment:
    """Return the experiment that reads the time of a command that ran before, because it is too long to run here."""
    figure = Figure(
        f"{TIMED_COMMANDS[name]}: time", "over that of a process that imports torch, of the last run that passed"
    )
    return Experiment(name, (figure,), partial(read_time, name), rounds=1, quick_rounds=1)


def read_time(name: str, rounds: int) -> Sequence[Rounds]:
    """Return the only round, the stored time of a command; raise `NotMeasuredError` if there is none.

    rounds : ignored
    """
    times = read_times()
    if name not in times:
        raise NotMeasuredError(f"build/times.json has no time of {name}")
    return [[(times[name]["seconds"], times[name]["import_torch_s"])]]


COMMANDS = (
    Experiment("start", (START,), measure_start, rounds=9, quick_rounds=5),
    *(timed_experiment(name) for name in TIMED_COMMANDS),
)
