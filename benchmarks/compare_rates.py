"""Measure the error rates of the gate `slower<=5%` and of the rows' verdicts, on an idle and on a loaded machine.

A program's calls are replayed repeatedly by `opreplay --repeats`, first on the idle machine, then while one and two
other processes compute all the time. Every run is compared with every other one: a failed gate is a false failure. Then
the second run's calls of more than 50 us are slower by 5, 10, 20, 100 and 900 percent: a gate that passes has missed
it. These slowdowns are planted: the recorded times of the run are multiplied. One slowdown is real: the idle runs are
compared with runs whose operators use no vector instructions (`ATEN_CPU_CAPABILITY=default`).

Runs stay in the folder of `--keep`, and existing runs are not repeated: an interrupted benchmark continues.

    python benchmarks/compare_rates.py --keep DIR [--seconds 1200] [-o benchmarks/results/compare_rates.json]
    python benchmarks/compare_rates.py --markdown benchmarks/results/compare_rates.json
    python benchmarks/compare_rates.py --keep DIR --trace traces/faster_rcnn.jsonl --top 25 --repeats 1 --threads 2 \
        -o benchmarks/results/compare_rates_detector.json
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from others import Usage, share_of_others
from workloads import WORKLOADS

from opgrip.capture import Capture
from opgrip.replay.reports.comparison.comparison import Outcome, compare
from opgrip.replay.reports.comparison.unpaired_ratio import SHORT_US, Verdict, contended_share
from opgrip.replay.reports.outcome import Results
from opgrip.replay.results.results import Result

GATE, TOTAL_GATE = "slower<=5%", "total<=5%"
SLOWDOWNS = (1.0, 1.05, 1.1, 1.2, 2.0, 10.0)
BURNERS = (0, 1, 2)
REAL = "real"
RESULTS = Path(__file__).parent / "results" / "compare_rates.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=15, help="of each kind (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="of each run (default: %(default)s)")
    parser.add_argument("--top", type=int, default=40, help="cases with most time (default: %(default)s)")
    parser.add_argument("--workload", choices=WORKLOADS, default="BERT train", help="default: %(default)s")
    parser.add_argument("--trace", type=Path, help="replay this trace instead of one of the workload")
    parser.add_argument("--threads", type=int, default=1, help="of an operator (default: %(default)s)")
    parser.add_argument("--keep", type=Path, help="folder for the runs; existing runs are not repeated")
    parser.add_argument("--seconds", type=float, default=1200, help="begin no run after so long (default: %(default)s)")
    parser.add_argument("-o", "--output", type=Path, default=RESULTS, help="JSON file (default: %(default)s)")
    parser.add_argument("--markdown", type=Path, metavar="JSON", help="print the table of an earlier benchmark")
    args = parser.parse_args()
    if args.markdown is not None:
        print(as_markdown(json.loads(args.markdown.read_text())))
        return
    if args.keep is None:
        parser.error("name a folder for the runs with --keep")
    found = measure(args)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(found, indent=1) + "\n")
    print(as_markdown(found))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Make the runs, alternating between kinds so that all meet the same load, and compare them."""
    began, before = monotonic(), Usage.now()
    args.keep.mkdir(parents=True, exist_ok=True)
    trace = args.trace or args.keep / "trace.jsonl"
    if not trace.exists():
        capture(args.workload, trace)
    runs: dict[str, list[Results]] = {str(kind): [] for kind in (*BURNERS, REAL)}
    others: list[float] = []
    for number, kind in product(range(args.runs), runs):
        output = args.keep / f"{kind}-{number}.json"
        if not output.exists() and monotonic() - began < args.seconds:
            with burners(0 if kind == REAL else int(kind)):
                usage = Usage.now()
                run(trace, output, args, {"ATEN_CPU_CAPABILITY": "default"} if kind == REAL else {})
                if kind == "0":
                    others.append(share_of_others(usage, Usage.now()))
        if output.exists():
            runs[kind].append(Results.load(output))
    return {
        "gate": GATE,
        "workload": args.trace.stem if args.trace else args.workload,
        "cases": args.top,
        "repeats": args.repeats,
        "processors": os.cpu_count(),
        "others": max(others, default=share_of_others(before, Usage.now())),
        "rows": list(compared(runs)),
    }


def capture(workload: str, trace: Path) -> None:
    """Record three steps of a program, after one that is not recorded, to the file `trace`."""
    torch.set_num_threads(1)
    program = WORKLOADS[workload]()
    assert program is not None, f"{workload} lacks a package"
    program()
    with Capture(trace):
        for _ in range(3):
            program()


def run(trace: Path, output: Path, args: argparse.Namespace, variables: Mapping[str, str]) -> None:
    """Replay a trace with the command `opreplay`, and write its results to `output`.

    args : parsed options of this benchmark
    variables : additional environment variables of the command
    """
    command = [str(Path(sys.executable).with_name("opreplay")), str(trace), "--top", str(args.top)]
    command += ["--repeats", str(args.repeats), "--threads", str(args.threads), "-o", str(output)]
    environment = os.environ | {"OPGRIP_STORE": "", "OMP_NUM_THREADS": str(args.threads)} | variables
    subprocess.run(command, check=True, capture_output=True, env=environment)


@contextmanager
def burners(count: int) -> Iterator[None]:
    """Keep `count` other processes computing."""
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def compared(runs: Mapping[str, Sequence[Results]]) -> Iterator[dict[str, Any]]:
    """Yield a row for each load and slowdown, with how often the gate failed, did not decide and passed.

    runs : results of replays, by number of other busy processes; `REAL` for runs without vector instructions
    """
    idle = runs["0"]
    for count, factor in product(BURNERS, SLOWDOWNS):
        loaded = runs[str(count)]
        pairs = [(base, new) for base in idle for new in loaded if base is not new]
        pairs += [(base, new) for base in loaded for new in idle if base is not new and count]
        pairs += [(base, new) for base in loaded for new in loaded if base is not new and count]
        yield row_of(count, f"{factor - 1:.0%}", pairs, lambda new, factor=factor: slowed(new, factor))
    real = [(base, new) for base in idle for new in runs[REAL]]
    yield row_of(0, "ATEN_CPU_CAPABILITY=default", real, lambda new: new)


def row_of(
    count: int, slowdown: str, pairs: Sequence[tuple[Results, Results]], change: Callable[[Results], Results]
) -> dict[str, Any]:
    comparisons = [compare(base, change(new)) for base, new in pairs]
    outcomes = Counter(comparison.gate(GATE)[0].outcome.value for comparison in comparisons)
    totals = Counter(comparison.gate(TOTAL_GATE)[0].outcome.value for comparison in comparisons)
    verdicts = Counter(pair.verdict.value for comparison in comparisons for pair in comparison.pairs)
    contended = [contended_share(row) for _, new in pairs for row in new]
    return {
        "burners": count,
        "slowdown": slowdown,
        "comparisons": len(pairs),
        "contended": sum(contended) / max(len(contended), 1),
        **{outcome.value: outcomes[outcome.value] for outcome in Outcome},
        "total": {outcome.value: totals[outcome.value] for outcome in Outcome},
        "verdicts": {verdict.value: verdicts[verdict.value] for verdict in Verdict},
    }


def slowed(results: Results, factor: float) -> Results:
    """Return results in which the times of the cases of more than 50 us are multiplied by `factor`."""

    def change(row: Result) -> Result:
        if (row.median_us or 0) <= SHORT_US:
            return row
        times = [time * factor for time in row.times_us or ()]
        return replace(row, times_us=times, median_us=(row.median_us or 0) * factor)

    return Results(list(map(change, results)), results.header)


def as_markdown(found: Mapping[str, Any]) -> str:
    """Return the table for docs/results.md with the rates in `found`, the result of `measure`."""
    lines = [
        "| other processes | slower | comparisons | failed | not decided | passed | rows SLOWER or FASTER | SAME |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in found["rows"]:
        if row["comparisons"]:
            shares = [f"{row[name] / row['comparisons']:.1%}" for name in ("failed", "not decided", "passed")]
            # results of older versions have no verdicts
            verdicts = row.get("verdicts", {})
            counts = [verdicts.get("SLOWER", 0) + verdicts.get("FASTER", 0), verdicts.get("SAME", 0)]
            shares += [f"{count / sum(verdicts.values()):.2%}" if verdicts else "-" for count in counts]
            lines.append(f"| {row['burners']} | {row['slowdown']} | {row['comparisons']:,} | {' | '.join(shares)} |")
    lines.append("")
    lines.append(
        f"{found['workload']}: {found['cases']} cases, {found['repeats']} repeats, {found['processors']} processors. "
        f"Besides these processes, others took up to {found['others']:.0%} of the processors."
    )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
