"""Measure the cost of a captured call and its size in the file, by program."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from capture_overhead import (
    EMPTY,
    EXECUTION_TRACE,
    FIRST,
    LATER,
    NATIVE,
    NEXT,
    OBSERVERS,
    OPGRIP,
    STEPS,
    Watch,
    count_calls,
    watch_steps,
)
from others import measure_part
from workloads import MISSING, WORKLOADS

from figures.figure import Experiment, Figure, NotMeasuredError, Rounds, ratio_of_added, ratio_of_sums

# parts of a watch, with their names in figures
PARTS = {
    "first step": (FIRST, "its first step"),
    "later steps": (NEXT, "steps 2 to 6"),
    "settled steps": (LATER, "steps 12 to 20"),
}
OBSERVER = {"ExecutionTraceObserver": EXECUTION_TRACE}
LEAST = {"empty mode": EMPTY}  # smallest reference: on longer operators the cost of a dispatch mode is lost in noise


def capture_experiment(workload: str, references: Mapping[str, str], rounds: int, quick_rounds: int = 0) -> Experiment:
    """Return the experiment that compares captures of a program with other observers.

    references : name of each observer, by its short name in the figures
    rounds, quick_rounds : as in `Experiment`
    """
    figures = [
        Figure(
            f"capture of {workload}: {steps} over {reference}",
            f"time that a capture adds to {meaning} over what {observer} adds to a later step",
            statistic=ratio_of_added,
        )
        for steps, (_, meaning) in PARTS.items()
        for reference, observer in references.items()
    ]
    size = Figure(f"trace of {workload}: size of a call", f"of {STEPS} steps' trace, plain", "bytes", ratio_of_sums)
    name = f"capture of {workload}"
    return Experiment(
        name, (*figures, size), partial(measure_captures, workload, tuple(references.values())), rounds, quick_rounds
    )


def measure_captures(workload: str, references: Sequence[str], rounds: int) -> Sequence[Rounds]:
    """Return the rounds of a program's figures: for each part and observer in `references`, then for the size."""
    torch.set_num_threads(1)
    step = WORKLOADS[workload]()
    if step is None:
        raise NotMeasuredError(MISSING)
    calls = count_calls(step)
    observers = (NATIVE, OPGRIP, *references)
    watches: dict[str, list[Watch]] = {observer: [] for observer in observers}
    sizes = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        for _ in range(rounds):
            for observer in observers:
                watch = partial(watch_steps, OBSERVERS[observer], step, STEPS, path)
                watches[observer].append(measure_part(watch).value)
                if observer == OPGRIP:
                    sizes.append((float(path.stat().st_size), float(calls * STEPS)))
    later = {name: steps_s(watches[name], NEXT) for name in (NATIVE, *references)}
    rounds_by_figure: list[Rounds] = []
    for part, _ in PARTS.values():
        own, alone = steps_s(watches[OPGRIP], part), steps_s(watches[NATIVE], part)
        rounds_by_figure += [list(zip(own, alone, later[name], later[NATIVE], strict=True)) for name in references]
    return [*rounds_by_figure, sizes]


def steps_s(watches: Sequence[Watch], part: slice) -> list[float]:
    """Return the mean duration of the steps in `part` in s, for each round in `watches`."""
    return [statistics.fmean(watch.step_s[part]) for watch in watches]


CAPTURE = (
    capture_experiment("tiny operators", LEAST | OBSERVER, rounds=10, quick_rounds=5),
    capture_experiment("Faster R-CNN predict", OBSERVER, rounds=5),
    capture_experiment("Faster R-CNN train", OBSERVER, rounds=4),
    capture_experiment("BERT train", OBSERVER, rounds=8, quick_rounds=4),
)
