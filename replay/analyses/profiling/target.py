"""What a profiler runs: cases once more, with few runs each.

`python -m opgrip.replay.analyses.profiling.target WORK ROWS`:
WORK is a JSON file with the job and the cases that are left out, ROWS gets a row a line.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from typing import Any

from opgrip.cli.own_python import own_python
from opgrip.replay.results.results import Result
from opgrip.replay.workers.job import Job
from opgrip.replay.workers.supervisor import supervise

MODULE = "opgrip.replay.analyses.profiling.target"


def command(folder: Path, job: Job, without: Collection[int], timeout_s: float) -> list[str]:
    """The command that a profiler is given, which finds what to do in a folder."""
    request = {"job": asdict(job), "without": sorted(without), "timeout_s": timeout_s}
    (folder / "work.json").write_text(json.dumps(request))
    return own_python(MODULE, str(folder / "work.json"), str(folder / "rows.jsonl"))


def rows_of(folder: Path) -> list[Result]:
    """The rows that the command left in a folder."""
    path = folder / "rows.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [Result.from_plain(json.loads(line)) for line in lines]


def main(request_path: str, output: str) -> int:
    """Run the cases."""
    work: dict[str, Any] = json.loads(Path(request_path).read_text())
    job = Job.from_plain(work["job"])
    loaded = job.load()
    with open(output, "w", encoding="utf-8") as file:
        # a fork would share this process's connection to the profiler
        for rows in supervise(job, loaded, work["timeout_s"], set(work["without"]), may_fork=False):
            for row in rows:
                file.write(json.dumps(row.to_plain()) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
