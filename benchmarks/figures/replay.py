"""Measure accuracy and throughput of a replay, and whether its outputs have the recorded shapes."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median

import pandas as pd
import torch
from replay_fidelity import (
    capture_program,
    captured_times,
    count_faithful,
    noise_floor,
    replay_trace,
    time_error,
    times_by_first,
)
from replay_throughput import PART, compare, joined, load_cases, usual_settings
from workloads import MISSING, REPLAYED

from figures.figure import Experiment, Figure, NotMeasuredError, Rounds, offset_of_ratios, ratio_of_sums
from opgrip.replay.inputs.input_options import RECORDED
from opgrip.replay.timing.timing_options import WARM
from opgrip.traces import Trace, load

STEPS = 3  # captured steps of a program whose times are compared
SIGNATURES = 100  # number of signatures that are replayed for their time: the longest
CASES = 40  # number of cases that a Timer times too
TIMED = "BERT train"


def error_experiment(workload: str, rounds: int) -> Experiment:
    """Return the experiment that measures the error of a program's replayed times, over that of a second capture."""
    meaning = "error in time of a replay over that of a second capture"
    figure = Figure(f"replay of {workload}: error over noise floor", meaning)
    return Experiment(f"replay of {workload}", (figure,), partial(measure_errors, workload), rounds)


def measure_errors(workload: str, rounds: int) -> list[Rounds]:
    """Measure the weighted errors of a replay and of a second capture, relative to a first one."""
    torch.set_num_threads(1)
    pairs = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            first, second = (_capture(workload, Path(folder) / f"{name}.jsonl", STEPS) for name in ("first", "second"))
            rows = replay_trace(Path(folder) / "first.jsonl", (RECORDED,), top=SIGNATURES).set_index("case")
        captured = captured_times(first)
        floor, _ = noise_floor(captured[captured.index.isin(rows.index)], times_by_first(first, second))
        error, _ = time_error(captured[captured.index.isin(rows.index)], rows["median_us"].dropna())
        pairs.append((error, floor))
    return [pairs]


def shapes_experiment(workload: str) -> Experiment:
    """Return the experiment that counts the signatures of a program whose replayed outputs have the recorded shapes."""
    meaning = "signatures whose outputs have the recorded shapes, of those for which these are known"
    figure = Figure(f"replay of {workload}: shapes as recorded", meaning, "", ratio_of_sums, larger_is_better=True)
    return Experiment(f"shapes of {workload}", (figure,), partial(measure_shapes, workload), rounds=1, quick_rounds=1)


def measure_shapes(workload: str, rounds: int) -> list[Rounds]:
    """Count output shapes in a replay that runs each signature once, untimed."""
    counts = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.jsonl"
            _capture(workload, path, steps=1)
            rows: pd.DataFrame = replay_trace(path, (RECORDED,), iterations=1, warmup=0, cache=WARM)
        right, compared = count_faithful(rows)
        counts.append((float(right), float(compared)))
    return [counts]


THROUGHPUT = Figure(
    "replay: throughput over the Timer's",
    f"cases a second of {TIMED}, over those of torch.utils.benchmark.Timer.blocked_autorange",
    larger_is_better=True,
)
MEDIANS = Figure(
    "replay: medians off the Timer's",
    "how far the median ratio of a case's median time to the Timer's is from one",
    "",
    offset_of_ratios,
)


def measure_throughput(rounds: int) -> Sequence[Rounds]:
    """Return the Timer's time and the replay's for the same cases, and the median ratio of their medians."""
    torch.set_num_threads(1)
    cases, settings = load_cases(TIMED)[:CASES], usual_settings()
    if not cases:
        raise NotMeasuredError(MISSING)
    parts = [cases[first : first + PART] for first in range(0, len(cases), PART)]
    comparisons = [joined([compare(part, settings) for part in parts]) for _ in range(rounds)]
    return [
        [(each.timer_s, each.replay_s) for each in comparisons],
        [(median(each.ratios()), 1.0) for each in comparisons],
    ]


def _capture(workload: str, path: Path, steps: int) -> Trace:
    if capture_program(REPLAYED[workload], path, steps) is None:
        raise NotMeasuredError(MISSING)
    return load(path)


REPLAY = (
    error_experiment("Faster R-CNN predict", rounds=3),
    error_experiment("BERT train", rounds=3),
    Experiment("throughput", (THROUGHPUT, MEDIANS), measure_throughput, rounds=3),
    shapes_experiment("Faster R-CNN predict"),
    shapes_experiment("BERT train"),
)
