"""What torch's own profiler sees of a replay, as one timeline for Perfetto or chrome://tracing."""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from opgrip.replay.measuring.results import OK, Result, not_run
from opgrip.replay.profilers.rows import key_of, why_unseen
from opgrip.replay.timing.ranges import TORCH
from opgrip.replay.workers.job import Job, Loaded
from opgrip.replay.workers.supervisor import supervise
from opgrip.traces.errors import UserError
from opgrip.traces.output import whole_file

RUNS = 3
"""Of each row, where their number is not given."""
SUFFIX = ".timeline.json.gz"


def record_timeline(
    job: Job,
    loaded: Loaded,
    results: Sequence[Result],
    output: Path,
    timeout_s: float,
    say: Callable[[str], None],
) -> None:
    """Run the cases once more under torch's profiler, and write what it saw.

    Parameters
    ----------
    say : is told where it is

    Raises
    ------
    UserError : where it saw nothing
    """
    with tempfile.TemporaryDirectory(prefix="opgrip-timeline-") as folder:
        job = replace(job, iterations=job.iterations or RUNS, profiled=TORCH, timelines=folder)
        effort = replace(loaded.settings.effort, iterations=job.iterations)
        settings = replace(loaded.settings, effort=effort, profiled=TORCH, timelines=Path(folder))
        rows_of_cases = supervise(job, replace(loaded, settings=settings), timeout_s, not_run(results), may_fork=True)
        rows = {key_of(row): row for rows in rows_of_cases for row in rows}
        parts = sorted(Path(folder).glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
        if not parts:
            raise UserError("torch's profiler saw no run", "see the rows' errors")
        with whole_file(output, force=True) as file, gzip.open(file, "wt", encoding="utf-8") as text:
            json.dump(merged(json.loads(path.read_text(encoding="utf-8")) for path in parts), text)
    for row in results:
        again = rows.get(key_of(row))
        if row.status == OK and (again is None or again.status != OK):
            say(f"the timeline has no run of case {row.case}, {row.op} as {row.mode}: {why_unseen(again)}")
    say(f"open it in https://ui.perfetto.dev: {output}")


def merged(timelines: Iterator[dict[str, Any]]) -> dict[str, Any]:
    """Chrome traces of one machine as one: their times count from the same moment."""
    whole: dict[str, Any] = {}
    for timeline in timelines:
        if not whole:
            whole = timeline
            # a temporary file's
            whole.pop("traceName", None)
            continue
        later_us = (timeline.get("baseTimeNanoseconds", 0) - whole.get("baseTimeNanoseconds", 0)) / 1e3
        for event in timeline["traceEvents"]:
            if "ts" in event:
                event["ts"] += later_us
            whole["traceEvents"].append(event)
    return whole
