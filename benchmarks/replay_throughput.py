"""How many cases a second are measured, beside `torch.utils.benchmark.Timer.blocked_autorange`, and whether they agree.

Both time the same calls on the same arguments with warm caches, many runs as one, part by part in turn. The Timer takes
as long as it does by default; a case of ours ends when its spread is small or has settled. The Timer runs twice, since
its own medians vary too.

    python benchmarks/replay_throughput.py --cases 200
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch.utils.benchmark import Measurement, Timer
from workloads import WORKLOADS

from opgrip.capture import Capture
from opgrip.replay import replay
from opgrip.replay.arguments.inputs import Inputs, device_map
from opgrip.replay.cases import Case, make_cases
from opgrip.replay.operators import find_operator
from opgrip.replay.results import OK, Result
from opgrip.replay.settings import Settings
from opgrip.replay.timing.caches import WARM
from opgrip.replay.timing.methods import CONTINUOUS
from opgrip.traces import load

PART = 10
NEAR = 0.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=100, help="with most time of the program (default: %(default)s)")
    parser.add_argument("--workload", choices=WORKLOADS, default="BERT train", help="default: %(default)s")
    args = parser.parse_args()
    torch.set_num_threads(1)
    cases = _cases(args.workload, args.cases)
    settings = Settings(device_map("cpu", None), "cpu", method=CONTINUOUS, cache=WARM)
    ours: list[Result] = []
    theirs: list[Measurement] = []
    again: list[Measurement] = []
    spent = [0.0, 0.0]
    for first in range(0, len(cases), PART):
        part = cases[first : first + PART]
        start = perf_counter()
        ours += replay(part, settings)
        middle = perf_counter()
        theirs += [_time(case, settings) for case in part]
        spent = [spent[0] + middle - start, spent[1] + perf_counter() - middle]
        again += [_time(case, settings) for case in part]
    _print(args.workload, ours, theirs, again, spent)


def _cases(workload: str, most: int) -> list[Case]:
    step = WORKLOADS[workload]()
    assert step is not None, "what the program needs is not installed"
    step()
    with tempfile.TemporaryDirectory() as folder:
        with Capture(Path(folder) / "t.jsonl"):
            step()
        cases = make_cases(load(Path(folder) / "t.jsonl"))
    # what writes into its arguments runs on other ones each time in a Timer
    return [case for case in cases if _runs_again(case)][:most]


def _runs_again(case: Case) -> bool:
    try:
        return not find_operator(case.signature).mutates and case.op != "aten.set_.source_Storage"
    except Exception:
        return False


def _time(case: Case, settings: Settings) -> Measurement:
    inputs = Inputs(case.signature.args, case.signature.kwargs, case.values, settings.place, settings.seed)
    args, kwargs = inputs.make()
    function = find_operator(case.signature).function
    with torch.no_grad():
        timer = Timer("function(*args, **kwargs)", globals={"function": function, "args": args, "kwargs": kwargs})
        return timer.blocked_autorange()


def _print(
    name: str,
    ours: Sequence[Result],
    theirs: Sequence[Measurement],
    again: Sequence[Measurement],
    spent: Sequence[float],
) -> None:
    pairs = [(our, their) for our, their in zip(ours, theirs, strict=True) if our.status == OK]
    ratios = np.array([our.median_us / (their.median * 1e6) for our, their in pairs if our.median_us])
    spreads = ([our.spread or 0.0 for our, _ in pairs], [their.iqr / their.median for _, their in pairs])
    console = Console(width=120)
    console.print(f"torch {torch.__version__}, one thread, {len(pairs)} cases of {name}", highlight=False)
    table = Table("", "cases a second", "spread: median, p90", "runs or blocks a case")
    runs = (np.mean([our.samples for our, _ in pairs]), np.mean([len(their.times) for _, their in pairs]))
    for label, seconds, spread, count in zip(("opgrip", "Timer"), spent, spreads, runs, strict=True):
        low, high = np.quantile(spread, (0.5, 0.9))
        table.add_row(label, f"{len(ours) / seconds:.1f}", f"{low:.2%}, {high:.2%}", f"{count:.0f}")
    console.print(table)
    console.print(f"{spent[1] / spent[0]:.1f} times the Timer's throughput; medians over the Timer's:", highlight=False)
    own = np.array([second.median / first.median for first, second in zip(theirs, again, strict=True)])
    for label, values in (("opgrip's", ratios), ("its own, a second time", own)):
        low, middle, high = np.quantile(values, (0.1, 0.5, 0.9))
        near = float(np.mean(np.abs(values - 1) <= NEAR))
        quantiles = f"{middle:.3f} (p10 {low:.3f}, p90 {high:.3f})"
        console.print(f"  {label}: {quantiles}, {near:.0%} within {NEAR:.0%}", highlight=False)


if __name__ == "__main__":
    main()
