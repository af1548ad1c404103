"""What one captured call costs, beside what other observers of a PyTorch program cost.

Every observer watches the same workloads in the same run, in turns; a figure is the median over the rounds. What an
observer adds to the watched steps, and what it takes afterwards to close and write its file, stand apart.

    python benchmarks/capture_overhead.py [--rounds 5]
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.setdefault("KINETO_LOG_LEVEL", "9")

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from opgrip.capture import Capture
from opgrip.samples.models.faster_rcnn import faster_rcnn

Workload = Callable[[], object]
Observer = Callable[[Path], Any]


class EmptyMode(TorchDispatchMode):
    """The least that any dispatch mode does."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class CountingMode(TorchDispatchMode):
    """How many calls a workload makes."""

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def nobody(path: Path) -> Iterator[None]:
    yield


@contextmanager
def empty_mode(path: Path) -> Iterator[None]:
    with EmptyMode():
        yield


@contextmanager
def execution_trace(path: Path) -> Iterator[None]:
    observer = ExecutionTraceObserver().register_callback(str(path))
    observer.start()
    yield
    observer.stop()
    observer.unregister_callback()


@contextmanager
def profiler_with_shapes(path: Path) -> Iterator[None]:
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as session:
        yield
    session.export_chrome_trace(str(path))


OBSERVERS: dict[str, Observer] = {
    "native": nobody,
    "empty dispatch mode": empty_mode,
    "opgrip": lambda path: Capture(path, force=True),
    "ExecutionTraceObserver": execution_trace,
    "profiler, record_shapes": profiler_with_shapes,
}


def tiny_operators() -> Workload:
    """Operators so small that the observer's cost is most of the time: 64 boxes, layers 32 wide."""
    torch.manual_seed(0)
    boxes, deltas = torch.rand(64, 4), torch.rand(64, 4)
    layers = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
    hidden = torch.rand(64, 32)

    def run() -> None:
        with torch.no_grad():
            for _ in range(150):
                size = boxes[:, 2:] - boxes[:, :2]
                centre = boxes[:, :2] + size * 0.5 + deltas[:, :2] * size
                half = size * deltas[:, 2:].exp() * 0.5
                torch.cat([centre - half, centre + half], dim=1).clamp(min=0.0, max=100.0)
                layers(hidden)

    return run


def detector() -> Workload:
    """The built-in two-stage detector, one prediction."""
    torch.manual_seed(0)
    model, inputs = faster_rcnn()
    model.eval()

    def run() -> None:
        with torch.no_grad():
            model(**inputs)

    return run


WORKLOADS: dict[str, Callable[[], Workload]] = {"tiny operators": tiny_operators, "detector": detector}


def main() -> int:
    """Measure, and print one table a workload."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5, help="steps in a round")
    args = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(width=100)
    console.print(f"torch {torch.__version__}, Python {platform.python_version()}, {cpu()}, one thread")
    for name, make in WORKLOADS.items():
        console.print(measure(name, make(), args.rounds, args.steps))
    return 0


def measure(name: str, workload: Workload, rounds: int, steps: int) -> Table:
    """The table of all observers on one workload."""
    with CountingMode() as counting:
        workload()
    calls = counting.calls * steps
    times: dict[str, list[float]] = {observer: [] for observer in OBSERVERS}
    closing: dict[str, list[float]] = {observer: [] for observer in OBSERVERS}
    sizes: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds):
            for observer, watch in OBSERVERS.items():
                path = Path(folder) / "trace.json"
                with watch(path):
                    workload()
                    start = perf_counter()
                    for _ in range(steps):
                        workload()
                    end = perf_counter()
                times[observer].append(end - start)
                closing[observer].append(perf_counter() - end)
                sizes[observer] = path.stat().st_size if path.exists() else 0
                path.unlink(missing_ok=True)
    # each file also holds the step before those that are timed
    recorded = calls * (steps + 1) / steps
    cost = {observer: statistics.median(values) / calls * 1e6 for observer, values in times.items()}
    after = {observer: statistics.median(values) / recorded * 1e6 for observer, values in closing.items()}
    bytes_a_call = {observer: size / recorded for observer, size in sizes.items()}
    return table(f"{name}: {calls // steps:,} calls a step, {steps} steps a round", cost, after, bytes_a_call)


def table(title: str, cost: dict[str, float], after: dict[str, float], size: dict[str, float]) -> Table:
    """Microseconds and bytes a call, of each observer."""
    added = {observer: value - cost["native"] for observer, value in cost.items()}
    rows = Table("observer", "us/call", "added us/call", "x empty mode", "closing us/call", "bytes/call", title=title)
    for column in rows.columns[1:]:
        column.justify = "right"
    for observer in OBSERVERS:
        ratio = f"{added[observer] / added['empty dispatch mode']:.2f}" if observer != "native" else "-"
        written = f"{size[observer]:.0f}" if size[observer] else "-"
        times = (f"{cost[observer]:.1f}", f"{added[observer]:.1f}", ratio, f"{after[observer]:.1f}")
        rows.add_row(observer, *times, written)
    return rows


def cpu() -> str:
    """Name and number of the processor's cores."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{name}, {os.cpu_count()} cores"


if __name__ == "__main__":
    sys.exit(main())
