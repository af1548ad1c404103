"""Measure the cost of a captured call, compared with other observers of a PyTorch program.

Observers alternate on the same workloads in one run; a figure is the median over the rounds. It is measured separately
for the first observed step, for steps 2 to 6, for steps 12 to 20, and for closing and writing the file, and compared
with what ExecutionTraceObserver adds to a later step. Peak memory is measured in a separate process, or on the
accelerator that `--device` names, and compared with the program without an observer. A run in which other programs took
the processors is repeated at most twice; the table reports how many stayed disturbed. These are left out; if they are
the majority, the figure is missing.

    python benchmarks/capture_overhead.py [--rounds 5] [--workload 'tiny operators'] [--device cuda] [--million]
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import resource
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, TypeAlias

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.setdefault("KINETO_LOG_LEVEL", "9")

import torch
from others import DISTURBED, are_too_few, measure_part
from rich.console import Console
from rich.table import Table
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from workloads import WORKLOADS, Workload, make_on, restart

from opgrip.capture import Capture
from opgrip.platform.activity_records import recorded_activities
from opgrip.replay.operators.devices import is_accelerator, module_of, name_of

Observer = Callable[[Path], Any]
# watches by observer, one per round; None if other programs disturbed it
Watches: TypeAlias = "dict[str, list[Watch | None]]"
STEPS = 20
# steps of a watch: everything is new in the first, the next ones learn, everything is known in the later ones
FIRST, NEXT, LATER = slice(0, 1), slice(1, 6), slice(11, 20)
NATIVE, EMPTY, OPGRIP, EXECUTION_TRACE = "native", "empty dispatch mode", "opgrip", "ExecutionTraceObserver"


class EmptyMode(TorchDispatchMode):
    """Dispatch mode that only calls the operator."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class CountingMode(TorchDispatchMode):
    """Count the calls of a workload."""

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
def debug_mode(path: Path) -> Iterator[None]:
    from torch.utils._debug_mode import DebugMode

    with DebugMode() as mode:
        yield
    path.write_text(mode.debug_string(), encoding="utf-8")


@contextmanager
def flop_counter(path: Path) -> Iterator[None]:
    with FlopCounterMode(display=False):
        yield


def profiler(**options: bool) -> Observer:
    @contextmanager
    def watch(path: Path) -> Iterator[None]:
        activities = [ProfilerActivity.CPU, *recorded_activities().values()]
        with profile(activities=activities, **options) as session:
            yield
        session.export_chrome_trace(str(path))

    return watch


OBSERVERS: dict[str, Observer] = {
    NATIVE: nobody,
    EMPTY: empty_mode,
    OPGRIP: lambda path: Capture(path, force=True),
    "FlopCounterMode": flop_counter,
    EXECUTION_TRACE: execution_trace,
    "DebugMode": debug_mode,
    "profiler, shapes": profiler(record_shapes=True),
    "profiler, shapes, stacks, modules": profiler(record_shapes=True, with_stack=True, with_modules=True),
}


@dataclass(frozen=True, slots=True)
class Watch:
    """Cost of an observer in one round.

    step_s : duration of each observed step in s, in order
    closing_s : time in s from the end of the last step until the observer had written its file
    """

    step_s: tuple[float, ...]
    closing_s: float


def main() -> int:
    """Measure, and print one table per workload."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workload", action="append", choices=tuple(WORKLOADS), help="default: all")
    parser.add_argument("--million", action="store_true", help="follow memory over a million calls instead")
    parser.add_argument("--device", default="cpu", help="that the programs run on (default: %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(width=150)
    console.print(
        f"torch {torch.__version__}, Python {platform.python_version()}, {cpu()}, one thread, {name_of(args.device)}"
    )
    if args.million:
        console.print(million())
        return 0
    for name in args.workload or WORKLOADS:
        workload = make_on(args.device, WORKLOADS[name])
        if workload is None:
            console.print(f"{name}: passed over, its package is not installed")
        else:
            console.print(measure(name, workload, args.rounds, args.device))
    return 0


def measure(name: str, workload: Workload, rounds: int, device: str = "cpu") -> Table:
    """Return the table of all observers for one workload, each measured in `rounds` rounds."""
    calls = count_calls(workload)
    watches: Watches = {observer: [] for observer in OBSERVERS}
    sizes = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        for _ in range(rounds):
            for observer, watch in OBSERVERS.items():
                part = measure_part(partial(watch_steps, watch, workload, STEPS, path))
                watches[observer].append(None if part.is_disturbed else part.value)
                sizes[observer] = sizes_of(path)
        peaks = {observer: peak_of(watch, workload, path, device) for observer, watch in OBSERVERS.items()}
    return table(f"{name}: {calls:,} calls a step", watches, sizes, peaks, calls)


def count_calls(workload: Workload) -> int:
    """Return the number of calls of a step other than the program's first."""
    restart(workload)
    workload()
    with CountingMode() as counting:
        workload()
    return counting.calls


def watch_steps(watch: Observer, workload: Workload, steps: int, path: Path) -> Watch:
    """Run steps of a workload under the observer `watch`, which may write its file to `path`; return the cost."""
    path.unlink(missing_ok=True)
    restart(workload)
    # do not collect garbage of the previous observer in this one's time
    gc.collect()
    step_s = []
    with watch(path):
        for _ in range(steps):
            start = perf_counter()
            workload()
            end = perf_counter()
            step_s.append(end - start)
    return Watch(tuple(step_s), perf_counter() - end)


def added_s(watches: Sequence[Watch], alone: Sequence[Watch], part: slice) -> list[float]:
    """Return the mean time in s that an observer added to a step, for each round.

    watches, alone : rounds with the observer, and without any
    part : steps of a round to average over
    """
    # per step: the steps of a program with a growing input differ
    return [
        statistics.fmean(one - other for one, other in zip(watch.step_s[part], native.step_s[part], strict=True))
        for watch, native in zip(watches, alone, strict=True)
    ]


def sizes_of(path: Path) -> tuple[int, int]:
    """Return the sizes of a file, plain and compressed, in bytes; 0 if it does not exist."""
    # zstandard may not be installed, and the rest of this module does not need it
    import zstandard

    data = path.read_bytes() if path.exists() else b""
    return len(data), len(zstandard.ZstdCompressor(level=9).compress(data)) if data else 0


def peak_of(watch: Observer, workload: Workload, path: Path, device: str = "cpu") -> float:
    """Return the peak memory of steps under the observer `watch`, in MB: the resident memory of a separate process, or
    the accelerator's memory.
    """
    if is_accelerator(device):
        # a fork cannot use the device
        module = module_of(device)
        module.reset_peak_memory_stats()
        watch_steps(watch, workload, STEPS, path)
        return float(module.max_memory_allocated()) / 1e6
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        watch_steps(watch, workload, STEPS, path)
        os.write(writer, str(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss).encode())
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        peak = int(pipe.read() or 0) / 1000
    os.waitpid(child, 0)
    return peak


def table(
    title: str,
    watches: Watches,
    sizes: dict[str, tuple[int, int]],
    peaks: dict[str, float],
    calls: int,
) -> Table:
    """Return a table of times, sizes and memory for each observer.

    watches : measured step times of each round, by observer; None for a disturbed round
    sizes : plain and compressed size in bytes of the observer's file, by observer
    peaks : peak memory in MB, by observer
    calls : number of calls of a step
    """
    reference = added_us(watches, EXECUTION_TRACE, NEXT, calls)
    empty = added_us(watches, EMPTY, LATER, calls)
    columns = ("first", "x", "2 to 6", "x", "12 to 20", "x", "x empty", "closing", "bytes", ".zst", "peak MB")
    rows = Table("added us/call, x ExecutionTraceObserver", *columns, title=title, caption=disturbances(watches))
    for column in rows.columns[1:]:
        column.justify = "right"
    for observer in watches:
        added = [added_us(watches, observer, part, calls) for part in (FIRST, NEXT, LATER)]
        cells = [text for us in added for text in (in_us(us), ratio(us, reference))]
        closing = in_us(closing_us(watches[observer], calls))
        bytes_per_call = [f"{size / (calls * STEPS):.1f}" if size else "-" for size in sizes[observer]]
        peak = f"{peaks[observer] - peaks[NATIVE]:+.0f}"
        to_empty = ratio(added[2], empty) if observer != NATIVE else "-"
        rows.add_row(observer, *cells, to_empty, closing, *bytes_per_call, peak)
    return rows


def added_us(watches: Watches, observer: str, part: slice, calls: int) -> float | None:
    """Return the median time in us that an observer added to a call, or None if most rounds are disturbed.

    watches : measured step times of each round, by observer; None for a disturbed round
    part : steps of a round that count
    calls : number of calls of a step
    """
    rounds = list(zip(watches[observer], watches[NATIVE], strict=True))
    quiet = [(watch, alone) for watch, alone in rounds if watch is not None and alone is not None]
    if are_too_few(quiet, len(rounds)):
        return None
    added = added_s([watch for watch, _ in quiet], [alone for _, alone in quiet], part)
    return statistics.median(added) / calls * 1e6


def closing_us(watches: Sequence[Watch | None], calls: int) -> float | None:
    """Return the time from the last step until an observer's file is written, in us per call.

    It is the median over the rounds in `watches`, or None if other programs disturbed most of them.

    calls : number of calls of a step
    """
    quiet = [watch.closing_s for watch in watches if watch is not None]
    return None if are_too_few(quiet, len(watches)) else statistics.median(quiet) / (calls * STEPS) * 1e6


def in_us(figure: float | None) -> str:
    return DISTURBED if figure is None else f"{figure:.1f}"


def ratio(figure: float | None, reference: float | None) -> str:
    """Return a table cell with `figure` divided by `reference`, or `-` if one of them is missing."""
    return "-" if figure is None or reference is None else f"{figure / reference:.2f}"


def disturbances(watches: Watches) -> str | None:
    """Return a note on how many rounds in `watches` other programs disturbed, or None if they disturbed none."""
    every = [watch for rounds in watches.values() for watch in rounds]
    count = every.count(None)
    return f"others took processors in {count} of {len(every)} watches, which are left out" if count else None


def million() -> Table:
    """Measure resident memory and file size of a capture over a million calls."""
    workload = WORKLOADS["tiny operators"]()
    assert workload is not None
    rows = Table("calls", "resident MB", "bytes/call", title="opgrip over a million calls", min_width=40)
    calls = count_calls(workload)
    with tempfile.TemporaryDirectory() as folder, Capture(Path(folder) / "trace.jsonl") as capture:
        done, shown = 0, 0
        while done < 1_000_000:
            workload()
            done += calls
            if done - shown >= 100_000:
                shown = done
                written = sum(path.stat().st_size for path in Path(folder).iterdir())
                rows.add_row(f"{done:,}", f"{resident_mb():.0f}", f"{written / done:.0f}")
    assert capture.dropped == 0
    return rows


def resident_mb() -> float:
    """Return the resident memory of this process in MB."""
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * os.sysconf("SC_PAGESIZE") / 1e6


def cpu() -> str:
    """Return the processor's name and number of cores."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{name}, {os.cpu_count()} cores"


if __name__ == "__main__":
    sys.exit(main())
