"""Start threads that meet everything at once under a capture; each trace must be valid and hold every call.

Sixteen threads begin together, with Python switching between them as often as possible: forward and backward passes,
modules, and a function of an extension, all with the same new signatures in each run.

    python benchmarks/threads_at_once.py [--runs 200]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from async_exceptions import MODES
from torch import nn

from opgrip.capture import Capture
from opgrip.traces import load
from opgrip.traces.analysis.validation import validate

THREADS = 16
SWITCH_S = 1e-6


def work(model: nn.Module, barrier: threading.Barrier, extension: Callable[[int], int], size: int) -> None:
    barrier.wait()
    for width in (size, size + 1):
        x = torch.ones(width, 8)
        (model(x).relu_() + 1).sum().backward()
        with torch.no_grad():
            torch.sort(x * 2)[1].float().mean()
        extension(width)


# calls of some operators that one thread makes
CALLS = Counter({"aten.ones.default": 2, "aten.relu_.default": 2, "aten.sort.default": 2, "aten.mean.default": 2})


def check(mode: str, number: int, folder: Path) -> list[str]:
    """Run the threads under a capture; return the errors in the trace."""
    path = folder / f"{number}.jsonl"
    model, barrier = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 4))), threading.Barrier(THREADS)
    with Capture(path, force=True, extensions=("math",), **MODES[mode]) as capture:
        import math

        arguments = (model, barrier, math.isqrt, 2 + number % 50)
        threads = [threading.Thread(target=work, args=arguments) for _ in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    problems = [str(capture.problem)] if capture.problem is not None else []
    problems += [item.message for item in validate(path).findings[:3]]
    trace = load(path)
    calls = Counter(trace.calls["op"].astype(str))
    problems += [f"{capture.dropped} calls lost: {trace.end.dropped}"] if capture.dropped and trace.end else []
    expected = Counter({op: count * THREADS for op, count in CALLS.items()} | {"math:isqrt": 2 * THREADS})
    problems += [f"{calls[op]} calls of {op}, not {count}" for op, count in expected.items() if calls[op] != count]
    return [f"{mode}, run {number}: {problem}" for problem in problems]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200, help="runs in each mode of capture")
    parser.add_argument("--mode", choices=[mode for mode in MODES if mode != "last 100"], action="append")
    args = parser.parse_args()
    torch.set_num_threads(1)
    sys.setswitchinterval(SWITCH_S)
    problems: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for mode in args.mode or ["plain"]:
            found = [item for number in range(args.runs) for item in check(mode, number, Path(folder))]
            print(f"{mode}: {args.runs} runs, {len(found)} problems")
            problems += found
    for problem in problems[:20]:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
