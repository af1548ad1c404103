"""Measure how much more several Ray workers do than one, for work that waits and for work that compiles.

Work that waits uses a planted mode that sleeps in each run, as if it waited for a device: workers share nothing then,
and the remaining cost is the engine's. Work that compiles uses torch.compile with empty caches. For work that waits,
only the middle half of the rows counts, because each worker starts by importing torch.

    python benchmarks/engines.py --workers 1,4
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

MODE = """
import time
from opgrip.replay.modes import Program, mode

@mode("waits", ahead=False)
def waits(task):
    def function(*args, **kwargs):
        time.sleep({seconds})
        return task.function(*args, **kwargs)
    return Program(function)
"""
SECONDS = 0.03
MODES = {"waits": 10, "compile": 1}  # number of runs of each case under each mode


def with_mode(folder: Path) -> dict[str, str]:
    """Return the environment of a process that has the planted mode and keeps no compiled code."""
    (folder / "waiting_mode.py").write_text(MODE.format(seconds=SECONDS))
    information = folder / "waiting_mode-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: waiting-mode\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[opgrip.modes]\nwaits = waiting_mode\n")
    own = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    cache = {"OPGRIP_CACHE": str(folder / "cache"), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    return os.environ | {"PYTHONPATH": own, "OPGRIP_STORE": ""} | cache


def make_trace(path: Path, cases: int) -> None:
    """Capture a number of operators with distinct shapes."""
    import torch

    from opgrip.capture import Capture

    with Capture(path):
        for size in range(1, cases + 1):
            torch.ones(size + 1, 4).sin()


def rate(trace: Path, mode: str, workers: int, environment: dict[str, str]) -> tuple[float, float]:
    """Return the cases per second that workers replay, and their start time in s, measured in a separate process.

    environment : environment variables of the process
    """
    command = [sys.executable, __file__, "--one", str(trace), mode, str(workers)]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    cases_per_s, started_s = json.loads(done.stdout.splitlines()[-1])
    return cases_per_s, started_s


def measure(trace: Path, mode: str, workers: int) -> tuple[float, float]:
    """Return the same as `rate`, for workers of this process."""
    from opgrip.cli.progress import QuietReporter
    from opgrip.replay.command.run_requests import request_with
    from opgrip.replay.run.workload import load_workload
    from opgrip.replay.workers.executors import EngineOptions
    from opgrip.replay.workers.executors.ray import start_ray

    request = request_with(trace, mode=mode, cache="warm", iterations=MODES[mode], warmup=0, threads=1, jobs=1)
    workload = load_workload(request)
    # no worker may wait for processors that it does not need
    with start_ray(EngineOptions(engine="ray", workers=workers, processors=0), processors=workers) as executor:
        begin = perf_counter()
        executor.about(workload)
        started = perf_counter()
        cached = executor.compile(workload, (), QuietReporter("engines"), False)
        compiled = perf_counter()
        times = [perf_counter() for _ in executor.run(workload, (), cached, False)]
    if cached:
        cases_per_s = len(cached) / (compiled - started)
    else:
        # not all workers were busy during the first and the last rows
        first, last = len(times) // 4, 3 * len(times) // 4
        cases_per_s = (last - first) / (times[last] - times[first])
    return cases_per_s, started - begin


def main() -> None:
    """Measure each kind of work with each number of workers, each in a separate process."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", default="1,4", help="numbers of workers (default: %(default)s)")
    parser.add_argument("--cases", type=int, default=160, help="that wait (default: %(default)s)")
    parser.add_argument("--compiled", type=int, default=8, help="cases that compile (default: %(default)s)")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        trace, mode, workers = args.one
        print(json.dumps(measure(Path(trace), mode, int(workers))))
        return
    with tempfile.TemporaryDirectory() as folder:
        environment = with_mode(Path(folder))
        print(f"{len(os.sched_getaffinity(0))} processors")
        for mode, cases in (("waits", args.cases), ("compile", args.compiled)):
            trace = Path(folder) / f"{mode}.jsonl"
            make_trace(trace, cases)
            for workers in map(int, args.workers.split(",") if cases else ()):
                cases_per_s, started_s = rate(trace, mode, workers, environment)
                told = f"{mode:8} {workers} workers: {cases_per_s:8.2f} cases/s"
                print(f"{told} (workers started in {started_s:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
