"""Compare the times of operators in captures and in torch.profiler, for the same steps.

A capture and torch.profiler alternate on steps of a program in one process. An operator's time in a step is the sum
over its calls, each by its median over steps and rounds, because a median over calls of several sizes would jump
between them. Half of the rounds is compared with the other half: captures with the profiler, and the profiler with
itself, which is the noise floor. The error is the sum over operators of |one - other| divided by the sum of times.
Operators whose calls take less than 50 us are left out, because the profiler's own work is a part of these times, and
so are operators that the profiler counts differently, because it also reports composite operators. On a GPU
(`--device cuda`) the times of kernels are compared, and only operators of less than 1 us are left out.

A round in which other programs took the processors is repeated at most twice, and left out if all were disturbed; a
program with too few rounds has no figures.

    python benchmarks/capture_truth.py --workload 'BERT train' [--worst 8]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Collection, Sequence
from functools import partial
from itertools import combinations
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.setdefault("KINETO_LOG_LEVEL", "9")

import numpy as np
import torch
from numpy.typing import NDArray
from others import DISTURBED, Part, are_too_few, in_a_process, measure_part
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile
from workloads import REPLAYED, Workload, make_on

from opgrip.capture import Capture, Schedule
from opgrip.platform.activity_records import recorded_activities
from opgrip.traces import load

WARMUP, LEARNED = 3, 2
STEPS = 3  # steps in a round of each observer
FIGURES = ("operators", "time in them", "capture off", "profiler off itself", "x noise floor")
# shortest operators that are compared, by the host's time and by that of their kernels
LEAST_US, LEAST_KERNEL_US = 50.0, 1.0
FEWEST_ROUNDS = 2  # fewest rounds: two halves with one each
MOST_HALVES = 40
Times = dict[str, list[float]]  # times of an operator's calls in us, in the order in which they ran
Medians = dict[str, NDArray[np.float64]]  # median times of an operator's calls in us, by their position in the step


def main() -> None:
    """Print one row per program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=REPLAYED, action="append", help="only this one; can be repeated")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--worst", type=int, default=0, metavar="N", help="also list the N operators of most error")
    parser.add_argument("--device", default="cpu", help="that the programs run on (default: %(default)s)")
    args = parser.parse_args()
    console = Console(width=120)
    table = Table("program", *FIGURES)
    for name in args.workload or REPLAYED:
        measured = in_a_process(measure_program, name, args.rounds, args.device)
        if measured is None:
            console.print(f"{name}: a required package is not installed")
            continue
        row, lines, worst = measured
        table.add_row(name, *row)
        for line in (*lines, *worst[: args.worst]):
            console.print(line, highlight=False)
    console.print(table)


def measure_program(name: str, rounds: int, device: str) -> tuple[tuple[str, ...], list[str], list[str]] | None:
    """Return a program's table cells, a line per round that other programs disturbed, and a line per operator.

    Return None if the program's package is not installed.
    """
    torch.set_num_threads(1)
    step = make_on(device, REPLAYED[name])
    if step is None:
        return None
    is_recorded = torch.device(device).type in recorded_activities()
    parts = measure(step, rounds, is_recorded)
    row, worst = compare_quiet(parts, LEAST_KERNEL_US if is_recorded else LEAST_US)
    return row, [f"{name}, a round: {part}" for part in parts if part.is_disturbed], worst


def measure(step: Workload, rounds: int, is_recorded: bool = False) -> list[Part[tuple[Times, Times]]]:
    """Return the operators' times in each round, from a capture and from the profiler.

    step : function that runs one step of the program
    is_recorded : True to compare the times of the operators' kernels, which the device records
    """
    for _ in range(WARMUP):
        step()
    return [measure_part(partial(measure_round, step, is_recorded)) for _ in range(rounds)]


def measure_round(step: Workload, is_recorded: bool = False) -> tuple[Times, Times]:
    """Return the operators' times from a capture, and from the profiler after it; parameters as for `measure`."""
    captured = captured_times(step, is_recorded)
    return captured, profiled_times(step, captured.keys(), is_recorded=is_recorded)


def captured_times(step: Workload, is_recorded: bool = False) -> Times:
    """Return the operators' times from a capture of steps, after steps in which it only examines new signatures.

    Parameters are as for `measure`.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        with Capture(path, schedule=Schedule(warmup=LEARNED, active=STEPS)) as capture:
            for place in range(LEARNED + STEPS):
                step()
                if place < LEARNED:
                    capture.step()
        calls = load(path).own_calls
    times: Times = defaultdict(list)
    column = "device_ns" if is_recorded else "duration_ns"
    for op, perturbed, duration in zip(calls["op"], calls["perturbed"], calls[column], strict=True):
        # without the overload, which the profiler does not report
        times["::".join(op.split(".")[:2])].append(float("nan") if perturbed and not is_recorded else duration / 1e3)
    return times


def profiled_times(step: Workload, captured: Collection[str], steps: int = STEPS, is_recorded: bool = False) -> Times:
    """Return the profiler's times of the operators in `captured` that ran outside others of them, in `steps` steps.

    Other parameters are as for `measure`.
    """
    activities = [ProfilerActivity.CPU, *(recorded_activities().values() if is_recorded else ())]
    with profile(activities=activities) as session:
        for _ in range(steps):
            step()
    times: Times = defaultdict(list)
    for event in session.events():
        above = event.cpu_parent
        while above is not None and above.name not in captured:
            above = above.cpu_parent
        if event.name in captured and above is None:
            times[event.name].append(event.device_time_total if is_recorded else event.time_range.elapsed_us())
    return times


def compare_quiet(
    rounds: Sequence[Part[tuple[Times, Times]]], least_us: float = LEAST_US
) -> tuple[tuple[str, ...], list[str]]:
    """Return the result of `compare` for the undisturbed rounds; without figures if these are too few.

    least_us : as in `compare`
    """
    quiet = [part.value for part in rounds if not part.is_disturbed]
    if are_too_few(quiet, len(rounds)) or len(quiet) < FEWEST_ROUNDS:
        return (DISTURBED,) * len(FIGURES), []
    return compare([captured for captured, _ in quiet], [profiled for _, profiled in quiet], least_us)


def compare(
    captured: list[Times], profiled: list[Times], least_us: float = LEAST_US
) -> tuple[tuple[str, ...], list[str]]:
    """Return the cells of a program's row, and a line per operator, largest error first.

    captured, profiled : times of each round from captures and from the profiler
    least_us : mean time of a call in us below which an operator is left out
    """
    ours, theirs = medians(captured), medians(profiled)
    ops = [
        op
        for op, times in theirs.items()
        if times.shape == ours.get(op, times[:0]).shape and min(_mean(ours[op]), _mean(times)) >= least_us
    ]
    if not ops:
        return ("0", *("-",) * (len(FIGURES) - 1)), []
    total = sum(theirs[op].sum() for op in ops)
    whole = sum(times.sum() for times in theirs.values())
    capture_off, floor = errors(captured, profiled, ops)
    lines = [
        f"{op}: {len(theirs[op])} a step, captured {_mean(ours[op]):.1f} us, profiled {_mean(theirs[op]):.1f} us"
        for op in sorted(ops, key=lambda op: -_difference(ours[op], theirs[op]))
    ]
    return (
        *(str(len(ops)), f"{total / whole:.0%}", f"{capture_off:.1%}", f"{floor:.1%}"),
        f"{capture_off / max(floor, 1e-9):.2f}",
    ), lines


def errors(captured: list[Times], profiled: list[Times], ops: Collection[str]) -> tuple[float, float]:
    """Return the relative difference between captures and profiler, and between profiler runs.

    Both compare the medians of one half of the rounds with the other half, and are means over all halves, because
    medians of more rounds would be closer to each other.

    ops : operators to compare
    """
    of_all = medians(captured)
    total = sum(medians(profiled)[op].sum() for op in ops)

    def off(one: Medians, other: Medians) -> float:
        return float(sum(_difference(one[op], other[op]) for op in ops) / max(total, 1e-9))

    offs = []
    for half, rest in halves(len(profiled)):
        captured_half = medians([captured[place] for place in half])
        # a call that was perturbed in all rounds of a half uses the times of the other half
        captured_half = {op: np.where(np.isnan(captured_half[op]), of_all[op], captured_half[op]) for op in ops}
        profiled_half, profiled_rest = (medians([profiled[place] for place in places]) for places in (half, rest))
        offs.append((off(captured_half, profiled_rest), off(profiled_half, profiled_rest)))
    capture_off, floor = map(statistics.fmean, zip(*offs, strict=True))
    return capture_off, floor


def halves(rounds: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the ways to divide rounds into two equal halves, or a sample of them if there are very many."""
    ways = list(combinations(range(rounds), rounds // 2))
    some = ways[:: max(1, len(ways) // MOST_HALVES)]
    return [(half, tuple(place for place in range(rounds) if place not in half)) for half in some]


def medians(rounds: list[Times]) -> Medians:
    """Return the median of each call, nan if unknown, for operators whose calls are the same in all steps."""
    counts = {op: {len(times.get(op, ())) for times in rounds} for op in rounds[0]}
    together: Medians = {}
    for op, (count, *others) in counts.items():
        if not others and count and count % STEPS == 0:
            by_place = np.array([times[op] for times in rounds]).reshape(-1, count // STEPS)
            known = np.ma.masked_invalid(by_place)
            together[op] = np.ma.median(known, axis=0).filled(np.nan)
    return together


def _difference(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """Return the absolute difference of the sums of times over the calls whose time is known in both."""
    return float(abs(np.nansum(one - other)))


def _mean(times: NDArray[np.float64]) -> float:
    return float(np.nanmean(times)) if not np.isnan(times).all() else 0.0


if __name__ == "__main__":
    main()
