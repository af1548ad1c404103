"""Check times on a busy machine: replay a trace on a quiet machine, then with programs that use the cores.

    python benchmarks/contended.py                                  # the trace of the built-in detector
    python benchmarks/contended.py mmdet.jsonl --threads 2

A row passes if its median is within 25 percent of the quiet one, or if its status excludes its time from results.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from others import measure_part

from opgrip.replay import Results
from opgrip.replay.results.results import OK

TRACE = Path(__file__).parents[1] / "traces" / "faster_rcnn.jsonl"
WITHIN = 0.25  # largest relative distance from the quiet median


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", nargs="?", type=Path, default=TRACE)
    parser.add_argument("--top", type=int, default=100, help="cases with most time (default: %(default)s)")
    parser.add_argument("--threads", type=int, help="of an operator; by default as in the program")
    args = parser.parse_args()
    quiet = measure_part(lambda: medians(args), tries=1)
    print(f"quiet: {len(quiet.value)} rows ok; {quiet}")
    for burners in (1, 2):
        with burning(burners):
            busy = medians(args)
        common = [key for key in quiet.value if key in busy]
        off = [key for key in common if abs(busy[key] / quiet.value[key] - 1) > WITHIN]
        rows = max(len(quiet.value), 1)
        print(
            f"next to {burners}: {1 - len(off) / rows:.1%} of {len(quiet.value)} rows within {WITHIN:.0%} of the quiet "
            f"median or not counted; {len(common) / rows:.1%} counted"
        )


def medians(args: argparse.Namespace) -> dict[str, float]:
    """Replay `args.trace`; return the median in us of each case that ran without an error, by key."""
    threads = [] if args.threads is None else ["--threads", str(args.threads)]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "rows.json"
        command = [args.trace, "--top", str(args.top), *threads, "-o", output, "--store", folder]
        subprocess.run([sys.executable, "-m", "opgrip.replay", *map(str, command)], check=True, capture_output=True)
        rows = Results.load(output).frame
    counted = rows[(rows["status"] == OK) & (rows["median_us"] > 0)]
    return dict(zip(counted["key"].astype(str), counted["median_us"].astype(float), strict=True))


@contextmanager
def burning(count: int) -> Iterator[None]:
    """Keep `count` processes busy, one core each."""
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


if __name__ == "__main__":
    main()
