"""Measure merging the traces of many ranks and finding their waits.

The ranks are synthetic: one collective in a hundred calls, one slow rank, and clocks that differ. Each command runs in
a separate process. Its time is processor time, minus that of a process that merges two ranks of 100 calls; its memory
is the peak of the process, including imports.

    python benchmarks/many_ranks.py [--ranks 64] [--calls 10000 100000]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests/support/builders"))
from made_ranks import make_rank

OPGRIP = "import sys; from opgrip.tools.opgrip import main; sys.exit(main(sys.argv[1:]))"
BETWEEN_NS = 50_000_000  # difference between the clocks of neighbouring ranks


@dataclass(frozen=True, slots=True)
class Cost:
    """Processor time in s and peak memory in MB of a process."""

    cpu_s: float
    peak_mb: float


def measure(*arguments: str | Path) -> Cost:
    """Return the cost of an opgrip command."""
    command = [sys.executable, "-c", OPGRIP, *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"opgrip {' '.join(map(str, arguments[:2]))} ended with {process.returncode}")
    return Cost(usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)


def costs(folder: Path, ranks: int, calls: int) -> tuple[Cost, Cost]:
    """Return the costs of merging `ranks` traces of `calls` calls, and of finding their waits."""
    slow = ranks // 2
    paths = [
        make_rank(folder / f"t.rank{rank}.jsonl", rank, ranks, calls, slow=slow, clock_ns=rank * BETWEEN_NS)
        for rank in range(ranks)
    ]
    whole = folder / "all.jsonl"
    results = (measure("trace", "merge", *paths, "-o", whole), measure("trace", "ranks", whole))
    for path in (*paths, whole):
        path.unlink()
    return results


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--ranks", type=int, default=64, metavar="N")
    parser.add_argument("--calls", type=int, nargs="+", default=[10_000, 100_000], metavar="N", help="of each rank")
    args = parser.parse_args(arguments)
    table = Table(title=f"{args.ranks} ranks")
    for heading in ("calls of each", "command", "CPU s", "million calls/s", "peak MB"):
        table.add_column(heading, justify="left" if heading == "command" else "right")
    with tempfile.TemporaryDirectory() as folder:
        starts = costs(Path(folder), 2, 100)
        for calls in args.calls:
            for name, cost, start in zip(
                ("merge", "ranks"), costs(Path(folder), args.ranks, calls), starts, strict=True
            ):
                seconds = max(cost.cpu_s - start.cpu_s, 0.01)
                rate = f"{args.ranks * calls / seconds / 1e6:.1f}"
                table.add_row(f"{calls:,}", f"trace {name}", f"{seconds:.1f}", rate, f"{cost.peak_mb:.0f}")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
