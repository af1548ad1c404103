"""Run a command and keep its duration, with the time of importing torch on this machine.

Set-up and tests are too long for `benchmarks/thresholds.py`, so it reads the durations kept here.

    python benchmarks/figures/times.py test -- .venv/bin/python -m pytest
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from statistics import median
from time import perf_counter

TIMES_FILE = Path(__file__).resolve().parents[2] / "build/times.json"
IMPORTS = 3


def main() -> int:
    """Run the command and return its exit status; the time of a failing command is not kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="that the time is kept under")
    parser.add_argument("--python", default=sys.executable, help="interpreter that has torch when the command is done")
    parser.add_argument("command", nargs="+", help="after --")
    args = parser.parse_args()
    # let the command handle Ctrl-C, since it may have workers to end
    signal.signal(signal.SIGINT, lambda number, frame: None)
    start = perf_counter()
    status = subprocess.run(args.command, check=False).returncode
    seconds = perf_counter() - start
    if status == 0:
        keep(args.name, seconds, median(import_seconds(args.python) for _ in range(IMPORTS)))
    return status


def import_seconds(python: str) -> float:
    """Return the seconds of a process that only imports torch."""
    start = perf_counter()
    subprocess.run([python, "-c", "import torch"], check=True)
    return perf_counter() - start


def keep(name: str, seconds: float, import_torch_s: float) -> None:
    """Add the duration of a command, and that of importing torch, to the file of durations under a name."""
    times = read_times() | {name: {"seconds": seconds, "import_torch_s": import_torch_s}}
    TIMES_FILE.parent.mkdir(exist_ok=True)
    written = TIMES_FILE.with_suffix(f".{os.getpid()}")
    written.write_text(json.dumps(times, indent=2) + "\n", encoding="utf-8")
    written.replace(TIMES_FILE)


def read_times() -> dict[str, dict[str, float]]:
    """Return the kept durations by name: `seconds` of the command, and `import_torch_s` for importing torch."""
    return json.loads(TIMES_FILE.read_text(encoding="utf-8")) if TIMES_FILE.exists() else {}


if __name__ == "__main__":
    sys.exit(main())
