"""Measure cases per second, compared with `torch.utils.benchmark.Timer.blocked_autorange`, and how well both agree.

Both time the same calls on the same arguments with warm caches, many runs as one, alternating in parts. The Timer takes
its default time; one of our cases ends when its spread is small or has settled. The Timer runs twice, because its own
medians vary too.

    python benchmarks/replay_throughput.py --cases 200
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch.utils.benchmark import Measurement, Timer
from workloads import WORKLOADS, make_on

from opgrip.capture import Capture
from opgrip.replay.cases.cases import Case, make_cases
from opgrip.replay.command.run_requests import request_with
from opgrip.replay.inputs.inputs import Inputs
from opgrip.replay.operators.lookup import find_operator
from opgrip.replay.results.results import OK, Result
from opgrip.replay.run.measure import measure_cases
from opgrip.replay.run.workload import Workload, workload_for
from opgrip.replay.timing.timing_options import CONTINUOUS, WARM
from opgrip.traces import load

PART = 10
NEAR = 0.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=100, help="with most time of the program (default: %(default)s)")
    parser.add_argument("--workload", choices=WORKLOADS, default="BERT train", help="default: %(default)s")
    parser.add_argument("--device", default="cpu", help="that the programs run on (default: %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    cases = load_cases(args.workload, args.device)[: args.cases]
    settings = usual_settings(args.device)
    parts: list[Comparison] = []
    again: list[Measurement] = []
    for first in range(0, len(cases), PART):
        part = cases[first : first + PART]
        parts.append(compare(part, settings))
        again += [time_case(case, settings) for case in part]
    _print(args.workload, joined(parts), again)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Results of a replay and a Timer for the same cases, with the time that each took."""

    results: list[Result]
    measurements: list[Measurement]
    replay_s: float
    timer_s: float

    def pairs(self) -> list[tuple[Result, Measurement]]:
        """Return the replay's result and the Timer's measurement of each case that the replay could run."""
        pairs = zip(self.results, self.measurements, strict=True)
        return [(result, measurement) for result, measurement in pairs if result.status == OK]

    def ratios(self) -> list[float]:
        """Return, for each case that ran, the replay's median time divided by the Timer's."""
        return [result.median_us / (timer.median * 1e6) for result, timer in self.pairs() if result.median_us]


def joined(parts: Sequence[Comparison]) -> Comparison:
    """Return one comparison with the cases of all `parts`."""
    results = [result for part in parts for result in part.results]
    measurements = [measurement for part in parts for measurement in part.measurements]
    return Comparison(results, measurements, sum(part.replay_s for part in parts), sum(part.timer_s for part in parts))


def usual_settings(device: str = "cpu") -> Workload:
    """Return the settings of a replay that times a case as a Timer does: many runs as one, with warm caches."""
    return workload_for(request_with("trace.jsonl", exec_mode=CONTINUOUS, cache=WARM, device=device))


def compare(cases: Sequence[Case], settings: Workload) -> Comparison:
    """Time cases by a replay, then by a Timer."""
    start = perf_counter()
    rows_of_case = {rows[0].case: rows for rows in measure_cases(cases, settings)}
    results = [row for case in cases for row in rows_of_case[case.number]]
    middle = perf_counter()
    measurements = [time_case(case, settings) for case in cases]
    return Comparison(results, measurements, middle - start, perf_counter() - middle)


def load_cases(workload: str, device: str = "cpu") -> list[Case]:
    """Return a program's calls that a Timer can repeat, longest first; empty if the program is not installed."""
    step = make_on(device, WORKLOADS[workload])
    if step is None:
        return []
    step()
    with tempfile.TemporaryDirectory() as folder:
        with Capture(Path(folder) / "t.jsonl"):
            step()
        cases = make_cases(load(Path(folder) / "t.jsonl"))
    # a Timer would run a call that writes into its arguments on different values each time
    return [case for case in cases if _runs_again(case)]


def _runs_again(case: Case) -> bool:
    try:
        return not find_operator(case.signature).mutates and case.op != "aten.set_.source_Storage"
    except Exception:
        return False


def time_case(case: Case, settings: Workload) -> Measurement:
    """Return a Timer's measurement of a case."""
    inputs = Inputs(
        case.signature.args, case.signature.kwargs, case.values, settings.place, settings.request.inputs.seed
    )
    args, kwargs = inputs.make()
    function = find_operator(case.signature).function
    with torch.no_grad():
        timer = Timer("function(*args, **kwargs)", globals={"function": function, "args": args, "kwargs": kwargs})
        return timer.blocked_autorange()


def _print(name: str, comparison: Comparison, again: Sequence[Measurement]) -> None:
    pairs = comparison.pairs()
    spreads = ([our.spread or 0.0 for our, _ in pairs], [their.iqr / their.median for _, their in pairs])
    console = Console(width=120)
    console.print(
        f"torch {torch.__version__}, one thread, {comparison.results[0].device}, {len(pairs)} cases of {name}",
        highlight=False,
    )
    table = Table("", "cases a second", "spread: median, p90", "runs or blocks a case")
    runs = (np.mean([our.samples for our, _ in pairs]), np.mean([len(their.times) for _, their in pairs]))
    seconds = (comparison.replay_s, comparison.timer_s)
    for label, spent_s, spread, count in zip(("opgrip", "Timer"), seconds, spreads, runs, strict=True):
        low, high = np.quantile(spread, (0.5, 0.9))
        table.add_row(label, f"{len(comparison.results) / spent_s:.1f}", f"{low:.2%}, {high:.2%}", f"{count:.0f}")
    console.print(table)
    console.print(
        f"{seconds[1] / seconds[0]:.1f} times the Timer's throughput; medians over the Timer's:", highlight=False
    )
    own = np.array([second.median / first.median for first, second in zip(comparison.measurements, again, strict=True)])
    for label, values in (("opgrip's", np.array(comparison.ratios())), ("its own, a second time", own)):
        low, middle, high = np.quantile(values, (0.1, 0.5, 0.9))
        near = float(np.mean(np.abs(values - 1) <= NEAR))
        quantiles = f"{middle:.3f} (p10 {low:.3f}, p90 {high:.3f})"
        console.print(f"  {label}: {quantiles}, {near:.0%} within {NEAR:.0%}", highlight=False)


if __name__ == "__main__":
    main()
