"""How much more several workers of Ray get done than one: work that waits, and work that compiles.

Work that waits is a mode of another package that sleeps in each run, as a device would be waited for: workers share
nothing then, and what is left is the engine's own. Work that compiles is torch.compile's, with nothing kept of before.
Of work that waits the middle half of the rows is counted: to start a worker takes torch's import, whatever it does
then.

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
MODES = {"waits": 10, "compile": 1}
"""How often each case runs under each."""


def with_mode(folder: Path) -> dict[str, str]:
    """The environment of a process that has the mode, and keeps nothing of what is compiled."""
    (folder / "waiting_mode.py").write_text(MODE.format(seconds=SECONDS))
    information = folder / "waiting_mode-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: waiting-mode\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[opgrip.modes]\nwaits = waiting_mode\n")
    own = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    cache = {"OPGRIP_CACHE": str(folder / "cache"), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    return os.environ | {"PYTHONPATH": own, "OPGRIP_STORE": ""} | cache


def make_trace(path: Path, cases: int) -> None:
    """Capture so many operators, each of a shape of its own."""
    import torch

    from opgrip.capture import Capture

    with Capture(path):
        for size in range(1, cases + 1):
            torch.ones(size + 1, 4).sin()


def rate(trace: Path, mode: str, workers: int, environment: dict[str, str]) -> tuple[float, float]:
    """How many cases a second such workers do in a process of its own, and seconds until they had started."""
    command = [sys.executable, __file__, "--one", str(trace), mode, str(workers)]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    cases_per_s, started_s = json.loads(done.stdout.splitlines()[-1])
    return cases_per_s, started_s


def measure(trace: Path, mode: str, workers: int) -> tuple[float, float]:
    """What `rate` gives, by workers of this process."""
    from opgrip.cli.progress import QuietReporter
    from opgrip.replay.replay_options import job_with
    from opgrip.replay.workers.engines.engine_options import EngineOptions
    from opgrip.replay.workers.engines.ray import start_ray

    job = job_with(trace, mode=mode, cache="warm", iterations=MODES[mode], warmup=0, threads=1, jobs=1)
    loaded = job.load()
    # no worker may wait for processors that it does not need
    with start_ray(EngineOptions(engine="ray", workers=workers, processors=0), processors=workers) as engine:
        runner = engine.runner(job, loaded, may_fork=False)
        begin = perf_counter()
        runner.about()
        started = perf_counter()
        cached = runner.compile((), QuietReporter("engines"))
        compiled = perf_counter()
        times = [perf_counter() for _ in runner.run((), cached)]
    if cached:
        cases_per_s = len(cached) / (compiled - started)
    else:
        # the first and the last rows are of a time when not all workers were at work
        first, last = len(times) // 4, 3 * len(times) // 4
        cases_per_s = (last - first) / (times[last] - times[first])
    return cases_per_s, started - begin


def main() -> None:
    """Measure each kind of work with each number of workers, in a process of its own each."""
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
