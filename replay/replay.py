"""Replays a trace or samples: selects cases, runs them in a process of their own, and adds what profilers see."""

from __future__ import annotations

import argparse
import os
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from opgrip.replay.measuring.measure import CachedRows
from opgrip.replay.measuring.results import Result, read_results
from opgrip.replay.options import check_method, job_of, make_parser
from opgrip.replay.outcome import Results, report_for, write_results
from opgrip.replay.profilers.options import profilers_of
from opgrip.replay.profilers.passes import under_profilers
from opgrip.replay.roofline.limits import threads_of, usual_threads, with_limits
from opgrip.replay.roofline.measuring import measure
from opgrip.replay.roofline.options import check_roofline
from opgrip.replay.workers.ahead import make_ahead, rows_ahead
from opgrip.replay.workers.job import Job, Loaded
from opgrip.replay.workers.journal import Journal, journal_path
from opgrip.replay.workers.supervisor import supervise
from opgrip.traces.ceilings.ceilings import Ceilings, keep, read_cached_ceilings, to_json
from opgrip.traces.devices import check_device
from opgrip.traces.errors import UserError, in_words_of_python
from opgrip.traces.keywords import arguments_of
from opgrip.traces.machine import available_memory
from opgrip.traces.output import check_writable
from opgrip.traces.progress import QuietReporter, Reporter


def replay(trace: str | Path, **options: Any) -> Results:
    """Replay the calls of a trace, or samples, as `opreplay` does.

    ::

        results = replay("traces/faster_rcnn.jsonl", mode=["eager", "jit"], top=20, device="cpu")
        results.frame

    Cases run in a process of their own: one that crashes, hangs or takes too much memory costs its row alone. That
    process starts as the program did, so a script calls this under `if __name__ == "__main__":`.

    Parameters
    ----------
    trace : a file that `Capture` or `opcapture` wrote; `samples`, `samples/NAME`, or a folder that `grip` wrote
    options : those of `opreplay --help` by their long names, with `_` for `-`. Where an option takes several, a list

    Raises
    ------
    TypeError : for an option that there is not
    UserError : for values that an option does not take, options that do not go together, and files that cannot be
        read or written
    """
    reporter = QuietReporter("opgrip")
    with in_words_of_python():
        args = arguments_of(make_parser(), [str(trace)], options, excluded=("strict", "sequence"))
        if is_whole(args):
            return Results(read_results(args.output), {"trace": str(trace)})
        job, loaded = load_job(args, reporter)
        replayed = replay_cases(args, job, loaded, reporter, may_fork=False)
        if replayed.problem is not None:
            raise replayed.problem
    if replayed.interrupted:
        raise KeyboardInterrupt
    return replayed.results


@dataclass(frozen=True, slots=True)
class Replayed:
    """What became of a replay.

    Attributes
    ----------
    results : of the cases that ran
    interrupted : whether the user ended it before the last case
    problem : why a profiler failed after the cases had run, or the output could not be written; None else
    has_limits : whether the rows are held against what the machine gives
    """

    results: Results
    interrupted: bool = False
    problem: UserError | None = None
    has_limits: bool = False


def is_whole(args: argparse.Namespace) -> bool:
    """Whether there is nothing to go on with.

    Raises
    ------
    UserError : where nothing says what to go on with
    """
    if not args.resume:
        return False
    if args.output is None:
        raise UserError("--resume needs to know what it goes on with", "name the file with --output")
    return args.output.exists() and not journal_path(args.output).exists() and not args.append


def load_job(args: argparse.Namespace, reporter: Reporter) -> tuple[Job, Loaded]:
    """What is to be replayed.

    Raises
    ------
    UserError : for options that do not go together, and files that cannot be read or written
    """
    if args.output is not None:
        check_output(args)
    job = job_of(args)
    loaded = job.load()
    for note in loaded.notes:
        reporter.say(note)
    check_method(job.method, str(check_device(loaded.settings.device)))
    return replace(job, memory_limit=job.memory_limit or available_memory(loaded.settings.device)), loaded


def check_output(args: argparse.Namespace) -> None:
    """Raise `UserError` where the results cannot be written as they are asked for."""
    if args.sequence:
        if args.output.suffix != ".json":
            raise UserError(f"a sequence is not written to {args.output}", "end its name in .json")
    else:
        report_for(args.output)
    if args.append and args.output.suffix == ".md":
        raise UserError(f"rows cannot be added to {args.output}", "write .json or .csv")
    check_writable(args.output, may_replace(args))


def may_replace(args: argparse.Namespace) -> bool:
    """Whether the output may exist."""
    return bool(args.force or args.append or args.resume)


def replay_cases(
    args: argparse.Namespace, job: Job, loaded: Loaded, reporter: Reporter, may_fork: bool = True
) -> Replayed:
    """Run the cases, then run them under profilers, and write the output.

    Parameters
    ----------
    may_fork : whether this process has run nothing of torch yet, and forks of it can
    """
    profilers = profilers_of(args, loaded.settings.device)
    check_roofline(args, loaded.settings.device)
    earlier = read_results(args.output) if args.append and args.output.exists() else []
    header = header_of(args, loaded)
    rows, interrupted = _run(job, loaded, args, reporter, may_fork)
    if interrupted:
        return Replayed(Results(rows, header), interrupted=True)
    try:
        rows, profilers_saw_all = under_profilers(
            job, loaded, rows, profilers, args.timeout, args.output, args.resume, reporter
        )
    except UserError as error:
        return Replayed(Results(rows, header), problem=error)
    if args.roofline:
        ceilings = _ceilings(loaded, reporter)
        rows = with_limits(rows, ceilings, threads_of(loaded))
        header |= {"ceilings": to_json(ceilings), "threads": usual_threads(rows, threads_of(loaded))}
    results = Results(rows, header)
    problem = None
    if args.output is not None:
        try:
            write_results([*earlier, *rows], header, args.output, may_replace(args))
        except UserError as error:
            problem = error
        else:
            if profilers_saw_all:
                journal_path(args.output).unlink(missing_ok=True)
    return Replayed(results, problem=problem, has_limits=args.roofline)


def _run(
    job: Job, loaded: Loaded, args: argparse.Namespace, reporter: Reporter, may_fork: bool
) -> tuple[list[Result], bool]:
    """The rows of all cases in order, and whether the user ended it before the last."""
    rows: dict[int, list[Result]] = {}
    with ExitStack() as stack:
        journal = None
        if args.output is not None:
            journal = stack.enter_context(Journal(args.output, job, args.resume, args.force or args.append))
            rows = journal.rows
        remaining = len(loaded.cases) - len(rows)
        compiled = _compile(job, loaded, args, reporter, rows, may_fork)
        try:
            with reporter.doing(f"replaying {remaining} cases on {loaded.settings.device}", remaining) as advance:
                for case_rows in supervise(job, loaded, args.timeout, set(rows), may_fork, compiled):
                    if journal is not None:
                        journal.add(case_rows)
                    rows[case_rows[0].case] = case_rows
                    advance()
            if journal is not None and args.ncu:
                # until ncu has seen all of them, or its batches could not be gone on with
                journal.keep()
        except KeyboardInterrupt:
            if journal is not None:
                journal.keep()
            return _in_order(rows, loaded), True
    return _in_order(rows, loaded), False


def _ceilings(loaded: Loaded, reporter: Reporter) -> Ceilings:
    """What the machine gives at most; measured the first time, when no process is forked any more."""
    device = loaded.settings.device
    ceilings = read_cached_ceilings(device)
    if ceilings is None:
        with reporter.doing("measuring what this machine gives at most"):
            ceilings = measure(device)
        reporter.say(f"opgrip machine shows it, from {keep(ceilings, device)}")
    return ceilings


def _compile(
    job: Job,
    loaded: Loaded,
    args: argparse.Namespace,
    reporter: Reporter,
    done: Collection[int],
    may_fork: bool,
) -> CachedRows:
    """What came of compiling the rows that take a compiler."""
    ahead = rows_ahead(loaded, done)
    if not ahead:
        return {}
    jobs = args.jobs or len(os.sched_getaffinity(0))
    with reporter.doing(f"compiling {len(ahead)} rows of {len(loaded.cases) - len(done)} cases", len(ahead)) as advance:
        try:
            return make_ahead(job, loaded, ahead, jobs, args.timeout, may_fork, advance)
        except KeyboardInterrupt:
            reporter.say("what is compiled is kept for the next time")
            raise


def _in_order(rows: dict[int, list[Result]], loaded: Loaded) -> list[Result]:
    return [row for case in loaded.cases for row in rows.get(case.number, [])]


def header_of(args: argparse.Namespace, loaded: Loaded) -> dict[str, Any]:
    """Where results come from, as files say it."""
    device = loaded.settings.device
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else device
    return {"trace": str(args.trace), "torch": torch.__version__, "device": name, "seed": args.seed}
