"""Whether recorded times are those of the program: of each operator, beside torch.profiler's own for the same steps.

A capture and torch.profiler watch steps of a program in turns, in one process. The medians of one half of the rounds
are compared by operator: those of the captures with the profiler's in the other half, and the profiler's with these
too. The error is the sum over operators of |one - other|, weighted by calls, over the sum of times. What the profiler
differs by from itself is the noise floor. Operators whose calls take less than 50 us are left out, since the profiler's
own work is a part of these, and so are those of which the profiler counts others, as it sees what operators are made
of.

A round in which others took the processors is measured again, at most twice, and left out where they always did; a
program with too few rounds has no figures.

    python benchmarks/capture_truth.py --workload 'BERT train' [--worst 8]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from itertools import combinations
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.setdefault("KINETO_LOG_LEVEL", "9")

import torch
from others import DISTURBED, Part, are_too_few, measure_part
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile
from workloads import REPLAYED, Workload

from opgrip.capture import Capture, Schedule
from opgrip.traces import load

WARMUP, LEARNED = 3, 2
STEPS = 3
"""In a round of each observer."""
FIGURES = ("operators", "time in them", "capture off", "profiler off itself", "x noise floor")
LEAST_US = 50.0
FEWEST_ROUNDS = 2
"""One half for each side of a comparison."""
MOST_HALVES = 40
Times = dict[str, list[float]]
"""Of an operator's calls, in us."""


def main() -> None:
    """Print a row a program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=REPLAYED, action="append", help="only this one; can be repeated")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--worst", type=int, default=0, metavar="N", help="also list the N operators of most error")
    args = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(width=120)
    table = Table("program", *FIGURES)
    for name in args.workload or REPLAYED:
        step = REPLAYED[name]()
        if step is None:
            console.print(f"{name}: what it needs is not installed")
            continue
        rounds = measure(step, args.rounds)
        for part in rounds:
            if part.is_disturbed:
                console.print(f"{name}, a round: {part}", highlight=False)
        row, worst = compare_quiet(rounds)
        table.add_row(name, *row)
        for line in worst[: args.worst]:
            console.print(line, highlight=False)
    console.print(table)


def measure(step: Workload, rounds: int) -> list[Part[tuple[Times, Times]]]:
    """The times of a program's operators, by round, from a capture and from the profiler, in turns."""
    for _ in range(WARMUP):
        step()
    return [measure_part(partial(measure_round, step)) for _ in range(rounds)]


def measure_round(step: Workload) -> tuple[Times, Times]:
    """The times of a capture, and those of the profiler after it."""
    captured = captured_times(step)
    return captured, profiled_times(step, captured.keys())


def captured_times(step: Workload) -> Times:
    """As a capture records them, after steps in which it learns."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        with Capture(path, schedule=Schedule(warmup=LEARNED, active=STEPS)) as capture:
            for place in range(LEARNED + STEPS):
                step()
                if place < LEARNED:
                    capture.step()
        calls = load(path).own_calls
    times: Times = defaultdict(list)
    for op, perturbed, duration in zip(calls["op"], calls["perturbed"], calls["duration_ns"], strict=True):
        # without the overload, which the profiler does not tell
        times["::".join(op.split(".")[:2])].append(float("nan") if perturbed else duration / 1e3)
    return times


def profiled_times(step: Workload, captured: Collection[str], steps: int = STEPS) -> Times:
    """As the profiler records those operators that a capture sees, and not what these are made of."""
    with profile(activities=[ProfilerActivity.CPU]) as session:
        for _ in range(steps):
            step()
    times: Times = defaultdict(list)
    for event in session.events():
        above = event.cpu_parent
        while above is not None and above.name not in captured:
            above = above.cpu_parent
        if event.name in captured and above is None:
            times[event.name].append(event.time_range.elapsed_us())
    return times


def compare_quiet(rounds: Sequence[Part[tuple[Times, Times]]]) -> tuple[tuple[str, ...], list[str]]:
    """The same as `compare` of the rounds that others did not disturb; no figures where these are too few."""
    quiet = [part.value for part in rounds if not part.is_disturbed]
    if are_too_few(quiet, len(rounds)) or len(quiet) < FEWEST_ROUNDS:
        return (DISTURBED,) * len(FIGURES), []
    return compare([captured for captured, _ in quiet], [profiled for _, profiled in quiet])


def compare(captured: list[Times], profiled: list[Times]) -> tuple[tuple[str, ...], list[str]]:
    """The cells of a program's row, and a line for each operator, the one of most error first."""
    ours, theirs = medians(captured), medians(profiled)
    counts = {op: len(times) for op, times in profiled[0].items()}
    ops = [
        op
        for op, count in counts.items()
        if count == len(captured[0][op]) and min(ours.get(op, 0.0), theirs.get(op, 0.0)) >= LEAST_US
    ]
    total = sum(theirs[op] * counts[op] for op in ops)
    whole = sum(sum(times) for times in profiled[0].values())
    capture_off, floor = errors(captured, profiled, {op: counts[op] for op in ops})
    lines = [
        f"{op}: {counts[op] // STEPS} a step, captured {ours[op]:.1f} us, profiled {theirs[op]:.1f} us"
        for op in sorted(ops, key=lambda op: -abs(ours[op] - theirs[op]) * counts[op])
    ]
    share = f"{total / max(whole, 1e-9):.0%}"
    return (str(len(ops)), share, f"{capture_off:.1%}", f"{floor:.1%}", f"{capture_off / max(floor, 1e-9):.2f}"), lines


def errors(captured: list[Times], profiled: list[Times], counts: Mapping[str, int]) -> tuple[float, float]:
    """How far captures are off the profiler's times, and how far these are off themselves.

    Both compare the medians of one half of the rounds with those of the other half, and are means over all halves:
    medians of more rounds would be nearer to each other by that alone.

    Parameters
    ----------
    counts : calls of the operators that are compared
    """
    of_all = medians(captured), medians(profiled)
    total = sum(of_all[1][op] * count for op, count in counts.items())

    def off(one: Mapping[str, float], other: Mapping[str, float]) -> float:
        return sum(abs(one[op] - other[op]) * count for op, count in counts.items()) / max(total, 1e-9)

    offs = []
    for half, rest in halves(len(profiled)):
        # an operator all of whose calls in a half were perturbed has the times of the others
        captured_half = of_all[0] | medians([captured[place] for place in half])
        profiled_half, profiled_rest = (medians([profiled[place] for place in places]) for places in (half, rest))
        offs.append((off(captured_half, profiled_rest), off(profiled_half, profiled_rest)))
    capture_off, floor = map(statistics.fmean, zip(*offs, strict=True))
    return capture_off, floor


def halves(rounds: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The places of rounds in two parts of one size, or nearly so, in all ways or in some of very many."""
    ways = list(combinations(range(rounds), rounds // 2))
    some = ways[:: max(1, len(ways) // MOST_HALVES)]
    return [(half, tuple(place for place in range(rounds) if place not in half)) for half in some]


def medians(rounds: list[Times]) -> dict[str, float]:
    """Of all rounds' calls, those that are not known left out."""
    together: Times = defaultdict(list)
    for times in rounds:
        for op, values in times.items():
            together[op] += [value for value in values if value == value]
    return {op: statistics.median(values) for op, values in together.items() if values}


if __name__ == "__main__":
    main()
