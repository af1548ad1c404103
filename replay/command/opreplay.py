"""The command `opreplay`."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from functools import partial

from opgrip.cli.command import run_command
from opgrip.cli.progress import Reporter, loading
from opgrip.replay.command.job import job_from_arguments, make_parser
from opgrip.replay.reports import OutputOptions


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else list(argv)
    return run_command(make_parser(), partial(run, words=words), words)


def run(args: argparse.Namespace, words: Sequence[str] = ()) -> int:
    job = job_from_arguments(args)
    with loading("opreplay"):
        from opgrip.replay.command.replay import plan
    again = shlex.join(["opreplay", *words, *(() if job[OutputOptions].resume else ("--resume",))])
    replay = plan(job, Reporter("opreplay"), again=again)
    replay.check_report()
    outcome = replay.run()
    return 0 if outcome is None else replay.report(outcome)
