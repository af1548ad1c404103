"""The Python function `replay()`, and the choice of the kind of replay that a job requests."""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from opgrip.cli.progress import QuietReporter, Reporter
from opgrip.errors import UserError, in_words_of_python
from opgrip.replay.command.job import ReplayJob, job_from_keywords
from opgrip.replay.command.replay_kind import Replay, keep, unfulfilled
from opgrip.replay.command.several_traces import SeveralTraces, targets_of
from opgrip.replay.command.trace_replay import Accuracy, OneTrace, Ranks, Step
from opgrip.replay.reports import OutputOptions
from opgrip.replay.reports.outcome import Results
from opgrip.replay.run.request import settle_shard
from opgrip.replay.sequences.step_options import SequenceOptions, launch_of
from opgrip.replay.workers.executors import EngineOptions, Executor
from opgrip.traces.table.trace import Trace


def plan(
    job: ReplayJob,
    reporter: Reporter,
    may_fork: bool = True,
    again: str = "",
    executor: Executor | None = None,
) -> Replay:
    """Return the replay of the kind that a job requests.

    may_fork : True if this process has not used torch yet
    """
    shard, launch = job[EngineOptions].shard, launch_of()
    if again and not job.is_step and shard is None and launch is not None and launch.world_size > 1:
        raise UserError(
            f"each of {launch.world_size} processes would replay all cases",
            "add --shard auto, or --sequence for a step",
        )
    job = job.having(OutputOptions, output=settle_shard(shard, job[OutputOptions].output))
    if job.is_step and launch is not None:
        return Ranks(job, reporter, launch)
    targets = targets_of(job.traces)
    if targets is not None:
        return SeveralTraces(job, reporter, targets, again, executor)
    step = Accuracy if job[SequenceOptions].accuracy else Step
    kind = step if job.is_step else OneTrace
    return kind(job, reporter, may_fork, again, executor)


def replay(
    trace: str | Path | Trace | Sequence[str | Path] | Mapping[str, Any] | None = None, **options: Any
) -> Results:
    """Replay the calls of a trace, or samples, as `opreplay` does.

    ::

        results = replay("traces/faster_rcnn.jsonl", mode=["eager", "jit"], top=20, device="cpu")
        results.frame

    Cases run in a separate process, so that a case that crashes, hangs or takes too much memory does not affect other
    cases.

    trace : a file that `Capture` or `opcapture` wrote, or a `Trace` that was loaded from it, filtered or not; several
        files, a folder of them, `zoo` or `zoo:PATTERN`, which are replayed in turn; `samples`, `sample:NAME`, or a
        folder that `grip` wrote; the contents of a PARAM configuration file as a dictionary; None if `operator` names
        what to replay
    options : long names of options in `opreplay --help`, with `_` for `-`, except `strict` and `list`; a list for
        options that take several values; `inputs` is a dictionary or a list of dictionaries

    Raises TypeError if an option is unknown.

    Raises UserError if the value of an option is invalid, options contradict each other, or a file cannot be read
    or written.
    """
    if isinstance(trace, Trace):
        if trace.path is None or "steps" in trace.selection:
            raise UserError("only whole files can be replayed", "write the steps to one: opgrip trace trim --steps")
        if twice := trace.selection.keys() & options.keys():
            raise UserError(f"the trace is already filtered by {min(twice)}", "pass it only once")
        return replay(trace.path, **trace.selection, **options)
    if isinstance(trace, Mapping):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "configuration.json")
            path.write_text(json.dumps(trace), encoding="utf-8")
            results = replay(path, **options)
            return replace(results, header={**results.header, "trace": path.name})
    with in_words_of_python():
        job = job_from_keywords(trace, options, excluded=("strict", "list"))
        results = run_job(job)
    for line in unfulfilled(job, results.rows):
        warnings.warn(line, stacklevel=2)
    return results


def run_job(job: ReplayJob, executor: Executor | None = None) -> Results:
    reporter = QuietReporter("opgrip")
    planned = plan(job, reporter, may_fork=False, executor=executor)
    outcome = planned.run()
    if outcome is None:
        return Results([], {})
    if outcome.problem is not None:
        raise outcome.problem
    if outcome.interrupted:
        raise KeyboardInterrupt
    output = planned.output
    if outcome.was_complete and isinstance(planned, SeveralTraces) and output.output is not None:
        return Results.load(output.output)
    if output.store is not None and not outcome.was_complete:
        keep(outcome.results, output, reporter)
    return outcome.results
