"""Measure time and memory of reading long traces, compared with JSON that is read whole.

The calls of a short capture are repeated until the trace has the requested length: one of tiny operators, and one of a
detector, a fifth of whose calls have signatures with values from several call sites. Each operation runs in a separate
process. Its time is processor time, which depends little on other programs, minus the time of a process that
imports the same modules and reads the short capture; its memory is the peak of the process. For comparison, the
files of other tools are made long in the same way and read whole: nodes of torch's `ExecutionTraceObserver` with
`json`, as Chakra's converter and PARAM's replay begin, and events of `torch.profiler` with `json` and `pandas`, as HTA
begins.

    python benchmarks/long_traces.py [--calls 100000 1000000] [--only info cases] [--most-others 1000000]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from repeated_calls import repeat_calls, repeat_items
from rich.console import Console
from rich.table import Table
from workloads import tiny_operators

from opgrip.capture import Capture

SHIPPED = Path(__file__).resolve().parents[1] / "traces/faster_rcnn.jsonl"
SPREAD = 0.3  # random variation of the durations of repeated calls
ROUNDS = 10  # repetitions of the program: 33,000 calls, from which files are made
VERB = "import sys; from opgrip.tools.opgrip import main; sys.exit(main(sys.argv[2:]))"
COST = "cost of the process:"
# code before an operation: reports its time and peak memory, because wait() would include the parent's memory
WATCH = f"""import atexit, os, re, resource, sys
resource.setrlimit(resource.RLIMIT_DATA, ({{0}}, {{0}}))
def tell():
    peak = re.search("VmHWM:\\\\s*(.*) kB", open("/proc/self/status").read())
    print("{COST}", sum(os.times()[:2]), peak[1], file=sys.stderr)
atexit.register(tell)
"""
# placeholders among the arguments of a process: the input file, and an output file next to it
FILE, OUTPUT = "{path}", "{folder}/out"
TRACE, DETECTOR, NODES, EVENTS = "trace", "detector", "nodes", "events"
TRACES = (TRACE, DETECTOR)


@dataclass(frozen=True, slots=True)
class Reading:
    """One way to read a file.

    of : kind of file that it reads
    code : Python that reads the file whose name is its first argument
    arguments : further arguments; `FILE` is replaced by the file
    """

    of: str
    code: str
    arguments: tuple[str, ...] = ()


READINGS = {
    "columns": Reading(
        TRACE,
        "import sys; from opgrip.traces import TraceReader\nfor item in TraceReader(sys.argv[1]).columns(): pass",
    ),
    "load": Reading(TRACE, "import sys; from opgrip.traces import load; load(sys.argv[1])"),
    "load, one module": Reading(
        TRACE, "import sys; from opgrip.traces import load; load(sys.argv[1], module='0', phase='forward').summary()"
    ),
    "load().calls": Reading(TRACE, "import sys; from opgrip.traces import load; load(sys.argv[1]).calls"),
    "info": Reading(TRACE, VERB, ("trace", "info", FILE)),
    "cases": Reading(
        TRACE,
        "import sys; from opgrip.traces import load; from opgrip.replay.cases.cases import make_cases\n"
        "make_cases(load(sys.argv[1]))",
    ),
    "cases of a detector": Reading(
        DETECTOR,
        "import sys; from opgrip.traces import load; from opgrip.replay.cases.cases import make_cases\n"
        "make_cases(load(sys.argv[1]))",
    ),
    "diff": Reading(TRACE, VERB, ("trace", "diff", FILE, FILE)),
    "merge": Reading(TRACE, VERB, ("trace", "merge", "-f", FILE, "-o", f"{OUTPUT}.jsonl")),
    "longtail": Reading(TRACE, VERB, ("longtail", "--bandwidth", "10", FILE)),
    "timeline": Reading(TRACE, VERB, ("trace", "timeline", "-f", FILE, "-o", f"{OUTPUT}.json")),
    "graph": Reading(TRACE, VERB, ("trace", "graph", FILE)),
    "nodes by json": Reading(NODES, "import sys, json, torch; json.load(open(sys.argv[1]))"),
    "events by pandas": Reading(
        EVENTS,
        "import sys, json, torch, pandas\nwith open(sys.argv[1]) as file:\n"
        "    pandas.json_normalize(json.load(file)['traceEvents'])",
    ),
}


@dataclass(frozen=True, slots=True)
class Cost:
    """Time and memory of a process."""

    seconds: float
    peak_mb: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, nargs="+", default=[100_000, 1_000_000], help="default: %(default)s")
    parser.add_argument("--only", nargs="+", choices=READINGS, metavar="NAME", help=f"of {', '.join(READINGS)}")
    parser.add_argument("--most-others", type=int, default=1_000_000, help="calls of other tools' files: %(default)s")
    parser.add_argument("--most-each", type=int, default=10_000_000, help="calls for what looks at each: %(default)s")
    parser.add_argument("--most-mb", type=int, default=6_000, help="memory of a process (default: %(default)s)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sources = record(Path(folder))
        table = Table("reading", "calls", "file MB", "CPU s", "calls/s", "peak MB", "above import MB", box=None)
        table.title = f"{os.cpu_count()} processors, torch {torch.__version__}"
        for name in args.only or READINGS:
            add_rows(table, name, sources, args)
        Console(width=120).print(table)


def record(folder: Path) -> dict[str, Path]:
    """Record the program as a trace, as the observer's nodes, and as the profiler's events."""
    run = tiny_operators()
    run()
    sources = {kind: folder / f"{kind}.json" for kind in (NODES, EVENTS)}
    sources |= {kind: folder / f"{kind}.jsonl" for kind in TRACES}
    shutil.copy(SHIPPED, sources[DETECTOR])
    with Capture(sources[TRACE]):
        for _ in range(ROUNDS):
            run()
    observer = torch.profiler.ExecutionTraceObserver().register_callback(str(sources[NODES]))
    observer.start()
    run()
    observer.stop()
    observer.unregister_callback()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profiler:
        run()
    profiler.export_chrome_trace(str(sources[EVENTS]))
    return sources


def add_rows(table: Table, name: str, sources: dict[str, Path], args: Any) -> None:
    """Add a row to a table for each length of file that the reading named `name` is measured on.

    sources : short file of each kind, whose calls are repeated
    args : parsed options of the benchmark
    """
    reading = READINGS[name]
    source = sources[reading.of]
    idle = min((measure(reading, source, args.most_mb) for _ in range(2)), key=lambda cost: cost.seconds if cost else 0)
    for calls in args.calls:
        if calls > (args.most_others if reading.of not in TRACES else args.most_each if name in EACH else calls):
            continue
        target = source.with_name(f"long{source.suffix}")
        number = make(reading.of, source, target, calls)
        cost = measure(reading, target, args.most_mb)
        cells = [name, f"{number:,}", f"{target.stat().st_size / 1e6:,.0f}"]
        target.unlink()
        if cost is None or idle is None:
            table.add_row(*cells, "-", "-", f"over {args.most_mb:,}", "-")
            continue
        seconds = cost.seconds - idle.seconds
        # less than the difference between two starts
        is_noise = seconds < idle.seconds / NOISE
        rate = f"{(number - length_of(reading.of, source)) / max(seconds, 1e-9):,.0f}"
        cells += ["-", "-"] if is_noise else [f"{seconds:.2f}", rate]
        table.add_row(*cells, f"{cost.peak_mb:,.0f}", f"{cost.peak_mb - idle.peak_mb:,.0f}")


NOISE = 10  # differences below this share of a start are noise
EACH = ("load().calls", "longtail", "timeline", "graph")  # operations that visit every call


def make(kind: str, source: Path, target: Path, calls: int) -> int:
    """Write to `target` the file `source` with its calls repeated to at least `calls`; return their number."""
    if kind in TRACES:
        return repeat_calls(source, target, calls, SPREAD)
    return repeat_items(source, target, NODES if kind == NODES else "traceEvents", calls)


def length_of(kind: str, source: Path) -> int:
    """Return the number of calls, nodes or events in the file `source`, of which `kind` is as in `Reading.of`."""
    if kind in TRACES:
        return int(json.loads(source.read_bytes().splitlines()[-1])["calls"])
    return len(json.loads(source.read_text())[NODES if kind == NODES else "traceEvents"])


def measure(reading: Reading, path: Path, most_mb: int) -> Cost | None:
    """Return the cost of a process that reads a file, or None if it needed more than `most_mb` MB of memory."""
    arguments = [word.format(path=path, folder=path.parent) for word in reading.arguments]
    command = [sys.executable, "-c", WATCH.format(most_mb << 20) + reading.code, str(path), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    told = done.stderr.rpartition(COST)[2].split()
    if done.returncode > 0 and "MemoryError" not in done.stderr:
        raise SystemExit(f"{' '.join(arguments)}: {done.stderr}")
    return None if done.returncode else Cost(float(told[0]), float(told[1]) / 1024)


if __name__ == "__main__":
    main()
