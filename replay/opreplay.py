"""The command `opreplay`: runs the calls of a trace again, and measures them."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from opgrip.replay.job import Job, Loaded
from opgrip.replay.options import check_method, job_of, make_parser
from opgrip.replay.profilers.options import profilers_of
from opgrip.replay.profilers.passes import under_profilers
from opgrip.replay.measure import Known
from opgrip.replay.reports import reports
from opgrip.replay.reports.modes import print_modes
from opgrip.replay.reports.report import Report
from opgrip.replay.reports.sweep import print_sweep
from opgrip.replay.reports.table import print_table
from opgrip.replay.results import OK, Result, read_results, summarize
from opgrip.replay.roofline.limits import threads_of, usual_threads, with_limits
from opgrip.replay.roofline.measuring import measure
from opgrip.replay.roofline.options import check_roofline
from opgrip.replay.roofline.table import print_roofline
from opgrip.replay.sequences.report import print_sequence
from opgrip.replay.sequences.sequence import SequenceSettings, replay_apart
from opgrip.replay.workers.ahead import make_ahead, rows_ahead
from opgrip.replay.workers.journal import Journal, journal_path
from opgrip.replay.workers.supervisor import supervise
from opgrip.traces.ceilings.ceilings import Ceilings, keep, kept_ceilings, to_json
from opgrip.traces.command import INTERRUPTED, run_command
from opgrip.traces.devices import check_device
from opgrip.traces.errors import UserError
from opgrip.traces.machine import available_memory
from opgrip.traces.output import check_writable, whole_file
from opgrip.traces.progress import Reporter


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; see `opreplay --help`."""
    return run_command(make_parser(), run, argv)


def run(args: argparse.Namespace) -> int:
    """Load the trace, replay its cases, print the table."""
    reporter = Reporter("opreplay")
    if args.resume and args.output is None:
        raise UserError("--resume needs to know what it goes on with", "name the file with --output")
    report = None if args.output is None else _report_for(args)
    if args.resume and args.output.exists() and not journal_path(args.output).exists() and not args.append:
        reporter.say(f"{args.output} is whole: there is nothing to go on with")
        return 0
    job = job_of(args)
    loaded = job.load()
    for note in loaded.notes:
        reporter.say(note)
    check_method(job.method, str(check_device(loaded.settings.device)))
    profilers = profilers_of(args, loaded.settings.device)
    check_roofline(args, loaded.settings.device)
    job = replace(job, memory_limit=job.memory_limit or available_memory(loaded.settings.device))
    earlier = read_results(args.output) if args.append and args.output.exists() else []
    if args.sequence:
        return _replay_sequence(job, loaded, args, reporter)
    results, interrupted = _replay(job, loaded, args, reporter)
    whole = True
    if not interrupted:
        try:
            results, whole = under_profilers(
                job, loaded, results, profilers, args.timeout, args.output, args.resume, reporter
            )
        except UserError:
            print_table(results, sys.stdout)
            raise
    ceilings = _ceilings(loaded, reporter) if args.roofline and not interrupted else None
    if ceilings is not None:
        results = with_limits(results, ceilings, threads_of(loaded))
    print_table(results, sys.stdout)
    print_modes(results, job.reference, sys.stdout)
    if args.sweep:
        print_sweep(results, sys.stdout)
    if ceilings is not None:
        print_roofline(results, sys.stdout)
    for result in results:
        if result.detail is not None:
            reporter.say(f"{result.op} {result.mode}:\n{result.detail.rstrip()}")
    if interrupted:
        more = f"go on with: opreplay {args.trace} ... --resume" if args.output else "with --output it could go on"
        reporter.say(f"interrupted after {_cases(results)} of {len(loaded.cases)} cases; {more}")
        return INTERRUPTED
    if report is not None:
        header = _header(args, loaded)
        if ceilings is not None:
            header |= {"ceilings": to_json(ceilings), "threads": usual_threads(results, threads_of(loaded))}
        _write(report, [*earlier, *results], header, args)
        if whole:
            journal_path(args.output).unlink(missing_ok=True)
    reporter.say(summarize(results))
    return 1 if args.strict and any(result.status != OK for result in results) else 0


def _replay_sequence(job: Job, loaded: Loaded, args: argparse.Namespace, reporter: Reporter) -> int:
    settings = SequenceSettings(
        place=loaded.settings.place,
        device=loaded.settings.device,
        seed=job.seed,
        extensions=loaded.settings.extensions,
        repeats=job.iterations,
        precision=job.precision,
        room_bytes=job.memory_limit,
    )
    with reporter.doing(f"replaying {len(loaded.trace.calls):,} calls in their order on {settings.device}"):
        result = replay_apart(loaded.trace, settings)
    print_sequence(result, sys.stdout)
    if args.output is not None:
        with whole_file(args.output, args.force) as file:
            file.write(json.dumps({**_header(args, loaded), **asdict(result)}, indent=1).encode() + b"\n")
    return 1 if args.strict and result.unsupported else 0


def _replay(job: Job, loaded: Loaded, args: argparse.Namespace, reporter: Reporter) -> tuple[list[Result], bool]:
    """The rows of all cases in order, and whether the user ended it before the last."""
    rows: dict[int, list[Result]] = {}
    with ExitStack() as stack:
        journal = None
        if args.output is not None:
            journal = stack.enter_context(Journal(args.output, job, args.resume, args.force or args.append))
            rows = journal.rows
        left = len(loaded.cases) - len(rows)
        known = _made_ahead(job, loaded, args, reporter, rows)
        doing = f"replaying {left} cases on {loaded.settings.device}"
        try:
            with reporter.doing(doing, left) as advance:
                for found in supervise(job, loaded, args.timeout, set(rows), True, known):
                    if journal is not None:
                        journal.add(found)
                    rows[found[0].case] = found
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
    known = kept_ceilings(device)
    if known is None:
        with reporter.doing("measuring what this machine gives at most"):
            known = measure(device)
        reporter.say(f"opgrip machine shows it, from {keep(known, device)}")
    return known


def _made_ahead(job: Job, loaded: Loaded, args: argparse.Namespace, reporter: Reporter, done: Collection[int]) -> Known:
    ahead = rows_ahead(loaded, done)
    if not ahead:
        return {}
    jobs = args.jobs or len(os.sched_getaffinity(0))
    with reporter.doing(f"compiling {len(ahead)} rows of {len(loaded.cases) - len(done)} cases", len(ahead)) as advance:
        try:
            return make_ahead(job, loaded, ahead, jobs, args.timeout, may_fork=True, advance=advance)
        except KeyboardInterrupt:
            reporter.say("what is compiled is kept for the next time")
            raise


def _in_order(rows: dict[int, list[Result]], loaded: Loaded) -> list[Result]:
    return [row for case in loaded.cases for row in rows.get(case.number, [])]


def _cases(results: Iterable[Result]) -> int:
    return len({result.case for result in results})


def _report_for(args: argparse.Namespace) -> Report:
    output: Path = args.output
    report = reports.get(output.suffix)
    if args.sequence and output.suffix != ".json":
        raise UserError(f"a sequence is not written to {output}", "end its name in .json")
    if report is None:
        raise UserError(f"{output} has no known form", f"end its name in {', '.join(reports.names())}")
    if args.append and output.suffix == ".md":
        raise UserError(f"rows cannot be added to {output}", "write .json or .csv")
    check_writable(output, args.force or args.append or args.resume)
    return report


def _write(report: Report, results: Sequence[Result], header: dict[str, Any], args: argparse.Namespace) -> None:
    text = io.StringIO()
    report(results, header, text)
    with whole_file(args.output, args.force or args.append or args.resume) as file:
        file.write(text.getvalue().encode())


def _header(args: argparse.Namespace, loaded: Loaded) -> dict[str, Any]:
    device = loaded.settings.device
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else device
    return {"trace": str(args.trace), "torch": torch.__version__, "device": name, "seed": args.seed}
