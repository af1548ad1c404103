"""`opcapture trigger`: record some steps of a process that runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from opgrip.capture.on_demand.client import find_processes
from opgrip.capture.on_demand.jobs import choose_ranks, record_together
from opgrip.cli.command import USAGE_ERROR, not_negative, positive, printable
from opgrip.cli.option_types import interval, percent
from opgrip.cli.progress import Reporter

DESCRIPTION = "Record some steps of a process that was started with an agent: opcapture list shows which were."
EXAMPLES = """\
examples:
  opcapture trigger 4711                    the next three steps, after one in which the capture learns
  opcapture trigger server --steps 10       by name; all ranks of a job record the same steps
  opcapture trigger 4711 --seconds 2 -o burst-%p-%n.jsonl.zst
"""


def prepare(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument("process", metavar="PID|NAME", help="as opcapture list shows it")
    parser.add_argument("--steps", type=positive, metavar="N", help="steps that are recorded (default: 3)")
    parser.add_argument("--seconds", type=interval, metavar="S", help="record the steps that begin in so much time")
    parser.add_argument(
        "--warmup", type=not_negative, metavar="N", help="steps before those, in which the capture learns (default: 1)"
    )
    parser.add_argument("--rank", type=not_negative, metavar="N", help="this rank of a job alone")
    parser.add_argument(
        "--step-module", metavar="PATTERN", help="a step is an outermost call of a module of such a class"
    )
    parser.add_argument(
        "--at", type=not_negative, metavar="N", help="begin where the job's count is N, as another node's trigger said"
    )
    parser.add_argument(
        "--wait", type=interval, default=60.0, metavar="S", help="for a step to begin (default: %(default)g)"
    )
    parser.add_argument(
        "--max-overhead", type=percent, metavar="SHARE", help="the most of the program's time that recording takes: 5%%"
    )
    parser.add_argument("-o", "--output", metavar="PATTERN", help="the trace (default: as the process was started)")


def run(args: argparse.Namespace) -> int:
    """Ask, wait, and tell what was recorded; the traces' names go to stdout."""
    reporter = Reporter("opcapture")
    chosen = choose_ranks(find_processes(args.process), args.rank, reporter)
    request = {
        "steps": args.steps,
        "seconds": args.seconds,
        "warmup": args.warmup,
        "step_module": args.step_module,
        "begins_at": args.at,
        "wait_s": args.wait,
        "output": None if args.output is None else str(Path(args.output).absolute()),
        "options": None if args.max_overhead is None else {"max_overhead": args.max_overhead},
    }
    results = record_together(chosen, request, reporter)
    for result in results:
        if result.get("file"):
            print(printable(result["file"]))
    return 0 if results and all(result.get("file") for result in results) else USAGE_ERROR
