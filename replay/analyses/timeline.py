"""The timeline analysis (`--profile`): a recording of torch's profiler, for Perfetto or chrome://tracing."""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from opgrip.cli.options import OUTPUT, option, titled
from opgrip.cli.output_files import whole_file
from opgrip.errors import UserError
from opgrip.replay.analyses import Analysis, AnalysisSession, analyses
from opgrip.replay.analyses.profiler_programs import key_of, why_unseen
from opgrip.replay.results.results import RAN, Result, not_run
from opgrip.replay.timing.ranges import TORCH

RUNS = 3  # default number of runs of each row
SUFFIX = ".timeline.json.gz"


@titled("profilers")
@dataclass(frozen=True, slots=True)
class TimelineOptions:
    profile: bool = option(
        False,
        "run the cases once more under torch's profiler, and write a timeline for Perfetto next to "
        f"--output, NAME{SUFFIX}",
        only=("single cases", "one trace"),
        role=OUTPUT,
        common=True,
    )


@analyses.register("timeline")
class TimelineAnalysis(Analysis):
    options = TimelineOptions
    order = 10

    def __init__(self, options: TimelineOptions, session: AnalysisSession) -> None:
        super().__init__(options, session)
        session.check_one_cache("torch's profiler")
        self._output = session.beside(SUFFIX)

    @classmethod
    def is_requested(cls, options: TimelineOptions) -> bool:
        return options.profile

    def add_to(self, rows: Sequence[Result]) -> list[Result]:
        from opgrip.replay.run.worker import run_cases

        session, say = self.session, self.session.reporter.say
        effort = session.workload.request.effort
        effort = replace(effort, iterations=effort.iterations or RUNS)
        with (
            tempfile.TemporaryDirectory(prefix="opgrip-timeline-") as folder,
            session.running(rows, "torch's profiler"),
        ):
            watched = session.workload.with_request(effort=effort, profiled=TORCH, timelines=folder)
            rows_of_cases = run_cases(watched, not_run(rows), session.may_fork)
            again = {key_of(row): row for case_rows in rows_of_cases for row in case_rows}
            parts = sorted(Path(folder).glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
            if not parts:
                raise UserError("torch's profiler recorded no run", "see the rows' errors")
            with whole_file(self._output, force=True) as file, gzip.open(file, "wt", encoding="utf-8") as text:
                json.dump(merged(json.loads(path.read_text(encoding="utf-8")) for path in parts), text)
        for row in rows:
            own = again.get(key_of(row))
            if row.status in RAN and (own is None or own.status not in RAN):
                say(f"the timeline has no run of case {row.case}, {row.op} as {row.mode}: {why_unseen(own)}")
        say(f"open the timeline in https://ui.perfetto.dev: {self._output}")
        return list(rows)


def merged(timelines: Iterator[dict[str, Any]]) -> dict[str, Any]:
    whole: dict[str, Any] = {}
    for timeline in timelines:
        if not whole:
            whole = timeline
            # the name of a temporary file
            whole.pop("traceName", None)
            continue
        later_us = (timeline.get("baseTimeNanoseconds", 0) - whole.get("baseTimeNanoseconds", 0)) / 1e3
        for event in timeline["traceEvents"]:
            if "ts" in event:
                event["ts"] += later_us
            whole["traceEvents"].append(event)
    return whole
