"""Runs the cases of a replay once more under each profiler that is wanted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from opgrip.replay.measuring.results import Result
from opgrip.replay.profilers.ncu import ncu
from opgrip.replay.profilers.ncu.journal import batches_path
from opgrip.replay.profilers.nsys import nsys
from opgrip.replay.profilers.options import Profilers
from opgrip.replay.profilers.timeline import record_timeline
from opgrip.replay.workers.job import Job, Loaded
from opgrip.traces.progress import Reporter


def under_profilers(
    job: Job,
    loaded: Loaded,
    results: Sequence[Result],
    profilers: Profilers,
    timeout_s: float,
    output: Path | None,
    resume: bool,
    reporter: Reporter,
) -> tuple[list[Result], bool]:
    """The rows with what profilers see of them; and whether these saw all that they should.

    Parameters
    ----------
    output : the file that the results go to; None where they go to none
    resume : go on with what an interrupted run left beside it

    Raises
    ------
    UserError : where a profiler fails
    """
    rows, whole, cases = list(results), True, len({row.case for row in results})
    if profilers.timeline is not None:
        with reporter.doing(f"running {cases} cases under torch's profiler"):
            record_timeline(job, loaded, rows, profilers.timeline, timeout_s, reporter.say)
    if profilers.nsys is not None:
        with reporter.doing(f"running {cases} cases under nsys"):
            rows = nsys.profiled(job, rows, profilers.nsys, timeout_s, reporter.say)
    if profilers.ncu is not None:
        journal_path = None if output is None else batches_path(output)
        with reporter.doing(f"running {cases} cases under ncu"):
            rows, whole = ncu.profiled(job, rows, profilers.ncu, timeout_s, journal_path, resume, reporter.say)
    return rows, whole
