"""How often `opgrip compare` is right: of one machine, of calls made slower, and of a machine that is busy.

A program's calls are replayed again and again, each time with `--repeats`. Every run is held against every other one by
the gate `slower<=5%`: what it fails is a false alarm. Then the runs are held against each other with the times of calls
over 50 us made longer by a tenth: what passes is missed. Last, a run is made while processes keep all processors busy,
and held against each of the others: no case may be called slower. Beside the gate stand tests that know nothing of
repeats: the ratio of medians alone, and the Mann-Whitney U test of all single times, corrected for their number.

    python benchmarks/compare_rates.py [--runs 15] [--repeats 5] [--top 60]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import numpy as np
import torch
from others import busy_processors, measure_part
from rich.console import Console
from rich.table import Table
from scipy.stats import false_discovery_control, mannwhitneyu
from workloads import WORKLOADS

from opgrip.capture import Capture
from opgrip.replay.comparing import compare
from opgrip.replay.comparing.gate import parse_gate
from opgrip.replay.comparing.priors import SHORT_US
from opgrip.replay.comparing.verdicts import ERROR, Verdict
from opgrip.replay.measuring.results import Result
from opgrip.replay.outcome import Results, read_run

GATE = parse_gate("slower<=5%")
SLOWDOWN = 1.1
Test = Callable[[Results, Results], bool]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=15, help="default: %(default)s")
    parser.add_argument("--repeats", type=int, default=5, help="of each run (default: %(default)s)")
    parser.add_argument("--top", type=int, default=60, help="cases with most time (default: %(default)s)")
    parser.add_argument("--workload", choices=WORKLOADS, default="BERT train", help="default: %(default)s")
    parser.add_argument("--keep", type=Path, help="folder for the runs; those that are there are not made again")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep or Path(temporary)
        folder.mkdir(exist_ok=True)
        trace = folder / "trace.jsonl"
        if not trace.exists():
            capture(args.workload, trace)
        words = ("--top", args.top, "--repeats", args.repeats)
        part = measure_part(lambda: [run(trace, folder / f"run{n}.json", words) for n in range(args.runs)], tries=1)
        with busy_processors():
            busy = run(trace, folder / "busy.json", words)
    report(args, part.value, busy, str(part))


def capture(workload: str, trace: Path) -> None:
    """Steps of a program, as `opcapture` records them."""
    torch.set_num_threads(1)
    program = WORKLOADS[workload]()
    assert program is not None, f"{workload} lacks a package"
    program()
    with Capture(trace):
        for _ in range(3):
            program()


def run(trace: Path, output: Path, words: Sequence[object]) -> Results:
    """A replay by the command."""
    if not output.exists():
        command = [str(Path(sys.executable).with_name("opreplay")), trace, *words, "--threads", "1", "-o", output]
        environment = os.environ | {"OPGRIP_STORE": "", "OMP_NUM_THREADS": "1"}
        subprocess.run([str(word) for word in command], check=True, capture_output=True, env=environment)
    return read_run(output)


def slowed(results: Results) -> Results:
    """A run of a machine on which calls over 50 us take a tenth longer."""
    return Results([_slowed(row) if (row.median_us or 0) > SHORT_US else row for row in results], results.header)


def _slowed(row: Result) -> Result:
    times = [time * SLOWDOWN for time in row.times_us or ()]
    return replace(row, times_us=times, median_us=(row.median_us or 0) * SLOWDOWN)


def by_gate(base: Results, new: Results) -> bool:
    """Whether the gate fails."""
    return any(True for _ in GATE.offenders(compare(base, new)))


def by_medians(base: Results, new: Results) -> bool:
    """Whether any median is more than 5 percent above what it was."""
    return any(now > 1.05 * old for old, now in zip(_medians(base), _medians(new), strict=True))


def by_ranks(base: Results, new: Results) -> bool:
    """The same, where a rank test of single times says that it is not by chance."""
    tests = [mannwhitneyu(a.times_us, b.times_us) for a, b in zip(base, new, strict=True)]
    adjusted = false_discovery_control([test.pvalue for test in tests])
    slower = np.array(_medians(new)) > 1.05 * np.array(_medians(base))
    return bool(((adjusted <= ERROR) & slower).any())


def _medians(results: Results) -> list[float]:
    return [row.median_us or 0.0 for row in results]


TESTS: dict[str, Test] = {"opgrip compare": by_gate, "ratio of medians": by_medians, "Mann-Whitney U": by_ranks}


def report(args: argparse.Namespace, runs: Sequence[Results], busy: Results, quiet: str) -> None:
    pairs = list(permutations(runs, 2))
    table = Table(title=f"{args.workload}: {len(runs[0])} cases, {len(runs)} runs of {args.repeats} repeats; {quiet}")
    for heading in ("gate slower<=5%", "same machine: passes", f"{SLOWDOWN - 1:.0%} slower over {SHORT_US} us: fails"):
        table.add_column(heading)
    for name, fails in TESTS.items():
        passed = sum(not fails(base, new) for base, new in pairs)
        found = sum(fails(base, slowed(new)) for base, new in pairs)
        table.add_row(name, *(f"{count} of {len(pairs)} ({count / len(pairs):.1%})" for count in (passed, found)))
    console = Console()
    console.print(table)
    same, slower = (sum_of(compare(a, change(b)).counts for a, b in pairs) for change in (lambda run: run, slowed))
    console.print(f"verdicts, same machine: {same}; with the slowdown: {slower}")
    console.print(f"verdicts of a run on a busy machine: {sum_of(compare(base, busy).counts for base in runs)}")


def sum_of(counts: Iterator[Counter[Verdict]]) -> str:
    """Verdicts of several comparisons."""
    total: Counter[Verdict] = sum(counts, Counter())
    return ", ".join(f"{total[verdict]:,} {verdict.value}" for verdict in Verdict)


if __name__ == "__main__":
    main()
