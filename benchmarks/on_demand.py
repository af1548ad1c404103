"""Measure the cost of on-demand recording: idle, from a request on, and while recording.

Idle: a million tiny operators with an agent, in a process that has recorded, and the same number without, alternating
in one process; the figure is the median over the pairs of the processor time with the agent, including its own, divided
by the time without. Requests: threads that call a small transformer, each call a request; latencies before, while and
after 200 of them are recorded. Budgets: steps of that transformer under `Capture(max_overhead=...)`, after the initial
budget is spent, compared with alternating steps that the capture does not see.

    python benchmarks/on_demand.py [--pairs 400] [--operators 2500] [--requests 2000] [--budget-s 60]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from figures.idle import idle_pairs
from rich.console import Console
from rich.table import Table
from torch import nn

import opgrip.capture
from opgrip.capture import Capture

THREADS = 3
RECORDED = 200
TRIGGERS = 10
BUDGETS = (0.01, 0.05)
TURN = 50


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=400)
    parser.add_argument("--operators", type=int, default=2_500, help="in each half of a pair")
    parser.add_argument("--requests", type=int, default=2000, help="before a recording, and after it")
    parser.add_argument("--budget-s", type=float, default=60.0, help="of steps under each budget, and as much without")
    args = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(width=100)
    with tempfile.TemporaryDirectory() as folder:
        ratios = [agent / alone for agent, alone in idle_pairs(args.pairs, args.operators, Path(folder))]
        low, middle, high = (sorted(ratios)[int(len(ratios) * share)] for share in (0.25, 0.5, 0.75))
        console.print(
            f"idle: {middle:.4f} times as long as without an agent ({low:.4f} to {high:.4f}, the middle half of "
            f"{len(ratios)} pairs of {args.operators:,} operators)"
        )
        table = Table("requests", "count", "p50 ms", "p99 ms")
        waits, latencies = serve(args.requests, Path(folder))
        for name, values in latencies.items():
            ordered = sorted(values)
            p50, p99 = (1e3 * ordered[int(len(ordered) * share)] for share in (0.5, 0.99))
            table.add_row(name, f"{len(values):,}", f"{p50:.2f}", f"{p99:.2f}")
        console.print(table)
        console.print(
            f"from a request for a recording to its first recorded call: {1e3 * statistics.median(waits):.1f} ms, the "
            f"median of {len(waits)}"
        )
        for share in BUDGETS:
            ratio, recorded, all_steps = budget(share, args.budget_s, Path(folder))
            console.print(
                f"max_overhead {share:.0%}: steps take {ratio:.4f} times as long as without a capture, and "
                f"{recorded:,} of {all_steps:,} are recorded"
            )
    return 0


def serve(requests: int, folder: Path) -> tuple[list[float], dict[str, list[float]]]:
    """Return the seconds from each recording request to the first recorded call, and the service's latencies in s:
    before, while and after calls are recorded.

    requests : number of latencies to measure before and after
    """
    net = transformer()
    latencies: list[float] = []
    ends = threading.Event()

    def answer() -> None:
        x = torch.rand(2, 16, 64)
        with torch.no_grad():
            while not ends.is_set():
                start = time.perf_counter()
                net(x)
                latencies.append(time.perf_counter() - start)
                time.sleep(0.001)

    threads = [threading.Thread(target=answer) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    # the first recording loads its modules
    trigger(folder / "first.jsonl", steps=1)
    del latencies[:]
    parts = {}
    wait_until(lambda: len(latencies) >= requests)
    parts["before"], before = latencies[:], len(latencies)
    trigger(folder / "during.jsonl", steps=RECORDED)
    during = len(latencies)
    parts["while 200 are recorded"] = latencies[before:during]
    wait_until(lambda: len(latencies) >= during + requests)
    parts["after"] = latencies[during:]
    waits = [trigger(folder / f"wait-{number}.jsonl", steps=1, warmup=0)["waited_s"] for number in range(TRIGGERS)]
    ends.set()
    for thread in threads:
        thread.join()
    return waits, parts


def transformer() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).eval()


def budget(share: float, seconds: float, folder: Path) -> tuple[float, int, int]:
    """Return the processor time of steps under a budget, divided by that of unobserved steps; the number of recorded
    steps, and of all observed steps.

    share, seconds : value of `max_overhead`, and approximate duration of the measurement

    Steps that the capture sees alternate with the same number that it does not see and whose time does not
    count towards the budget, so that both run on the same machine state.
    """
    net, x = transformer(), torch.rand(2, 16, 64)
    aside_ns = 0

    def steps(count: int, ended: Callable[[], None] = lambda: None) -> int:
        start = time.thread_time_ns()
        for _ in range(count):
            net(x)
            ended()
        return time.thread_time_ns() - start

    steps(20)
    turns = round(seconds * 1e9 / steps(TURN))
    with torch.no_grad(), Capture(folder / f"budget-{share}.jsonl", max_overhead=share) as capture:
        recorder = capture._recorder
        spent = recorder.budget
        assert spent is not None
        spent._now_ns = lambda: time.perf_counter_ns() - aside_ns
        # the initial budget
        while not spent.left_out:
            steps(1, capture.step)
        alone = watched = 0
        before, written = spent.left_out, spent.writing_ns
        for _ in range(turns):
            watched += steps(TURN, capture.step)
            began = time.perf_counter_ns()
            capture._watching.pause()
            spent.leave_steps()
            alone += steps(TURN)
            aside_ns += time.perf_counter_ns() - began
        watched += spent.writing_ns - written
        passed = spent.left_out - before
    return watched / alone, turns * TURN - passed, turns * TURN


def trigger(path: Path, **extent: Any) -> dict[str, Any]:
    """Record to `path`, wait for the end, and return the result, such as the number of calls.

    extent : how much to record, as arguments of `opgrip.capture.trigger`
    """
    asked = opgrip.capture.trigger(path, **extent)
    asked.wait()
    if asked.result is None or asked.problem is not None:
        raise RuntimeError(asked.problem)
    return asked.result


def wait_until(event: Callable[[], bool]) -> None:
    while not event():
        time.sleep(0.01)


if __name__ == "__main__":
    sys.exit(main())
