"""The command `opreplay`: runs the calls of a trace again, and measures them."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from opgrip.replay.measuring.results import OK, summarize
from opgrip.replay.options import make_parser
from opgrip.replay.replay import header_of, is_whole, load_job, replay_cases
from opgrip.replay.reports.modes import print_modes
from opgrip.replay.reports.sweep import print_sweep
from opgrip.replay.reports.table import print_table
from opgrip.replay.roofline.table import print_roofline
from opgrip.replay.sequences.report import print_sequence
from opgrip.replay.sequences.sequence import SequenceSettings, replay_apart
from opgrip.replay.workers.job import Job, Loaded
from opgrip.traces.command import INTERRUPTED, run_command
from opgrip.traces.output import whole_file
from opgrip.traces.progress import Reporter


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; see `opreplay --help`."""
    return run_command(make_parser(), run, argv)


def run(args: argparse.Namespace) -> int:
    """Load the trace, replay its cases, print the tables."""
    reporter = Reporter("opreplay")
    if is_whole(args):
        reporter.say(f"{args.output} is whole: there is nothing to go on with")
        return 0
    job, loaded = load_job(args, reporter)
    if args.sequence:
        return _replay_sequence(job, loaded, args, reporter)
    replayed = replay_cases(args, job, loaded, reporter)
    rows = list(replayed.results)
    print_table(rows, sys.stdout)
    if replayed.problem is not None:
        raise replayed.problem
    print_modes(rows, job.reference, sys.stdout)
    if args.sweep:
        print_sweep(rows, sys.stdout)
    if replayed.has_limits:
        print_roofline(rows, sys.stdout)
    for row in rows:
        if row.detail is not None:
            reporter.say(f"{row.op} {row.mode}:\n{row.detail.rstrip()}")
    if replayed.interrupted:
        hint = f"go on with: opreplay {args.trace} ... --resume" if args.output else "with --output it could go on"
        reporter.say(f"interrupted after {len({row.case for row in rows})} of {len(loaded.cases)} cases; {hint}")
        return INTERRUPTED
    reporter.say(summarize(rows))
    return 1 if args.strict and any(row.status != OK for row in rows) else 0


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
            file.write(json.dumps({**header_of(args, loaded), **asdict(result)}, indent=1).encode() + b"\n")
    return 1 if args.strict and result.unsupported else 0
