"""`opgrip trace tuner`: recorded products, convolutions and attentions as lists for tuners of kernels."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from opgrip.cli.command import add_reading, counted
from opgrip.cli.output_files import check_output, write_text
from opgrip.cli.progress import Reporter
from opgrip.cli.terminal import print_line
from opgrip.errors import UserError
from opgrip.tools.verbs import add_output, verb

if TYPE_CHECKING:
    from opgrip.traces.formats.tuners import Problem, Tuner

NAMES = ("aiter", "tunableop", "hipblaslt", "benchdnn", "triton")
MOST_MISSING = 10
EXAMPLES = """\
examples:
  opgrip trace tuner step.jsonl --for aiter -o untuned.csv
  opgrip trace tuner step.jsonl --for tunableop -o tunableop_untuned0.csv
  opgrip trace tuner step.jsonl --tuned tunableop_results0.csv     which share of the time has a tuned entry
"""


def prepare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", type=Path, metavar="TRACE", help="a trace, or a file of another tool")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--for", dest="tuner", choices=NAMES, help="tuner for which to list the recorded shapes")
    what.add_argument(
        "--tuned", type=Path, metavar="FILE", help="print which share of the time has an entry in this file of a tuner"
    )
    add_output(parser, "list to write; further lists go next to it, with their kind in the name (default: stdout)")
    add_reading(parser)


@verb("trace tuner", "write recorded shapes for tuners of kernels, or find which are already tuned", EXAMPLES, prepare)
def run(args: argparse.Namespace) -> int:
    check_output(args.output, args.force)
    if args.output is not None and args.tuned is not None:
        raise UserError("--tuned writes no file", "leave -o out")

    from opgrip.traces import TraceReader, load
    from opgrip.traces.formats.tuners import TUNERS, lists_of, problems_of, read_tuned

    tuned = None if args.tuned is None else read_tuned(args.tuned)
    with Reporter(args.prog).reading(args.trace):
        trace = load(args.trace, args.partial, args.unbounded, TraceReader(args.trace, args.unbounded))
    problems = problems_of(trace)
    if tuned is not None:
        return _report_tuned(problems, *tuned)
    lists, skipped = lists_of(problems, TUNERS[args.tuner])
    for (name, reason), count in skipped.most_common():
        print(f"{args.prog}: {counted(count, 'call')} of {name} left out: {reason}", file=sys.stderr)
    if not lists:
        raise UserError(f"{args.trace} has no calls that {args.tuner} tunes", "see opgrip trace info")
    for place, (group, lines) in enumerate(lists.items()):
        if args.output is None:
            print("\n".join(lines if len(lists) == 1 else [f"# {group or 'gemm'}", *lines]))
            continue
        path = args.output.with_name(f"{args.output.stem}_{group}{args.output.suffix}") if place else args.output
        write_text("\n".join([*lines, ""]), path, args.force)
        print(f"{args.prog}: wrote the list {group or 'gemm'} to {path}", file=sys.stderr)
    return 0


def _report_tuned(problems: Sequence[Problem], tuner: Tuner, rows: Sequence[Mapping[str, str]]) -> int:
    from opgrip.replay.results.results import describe_shapes
    from opgrip.traces.formats.tuners import tuned_of

    tuned = tuned_of(problems, tuner, rows)
    share = sum(problem.share for problem, is_tuned in tuned if is_tuned)
    whole = sum(problem.share for problem, _ in tuned)
    print(
        f"{sum(is_tuned for _, is_tuned in tuned):,} of {counted(len(tuned), 'problem')} have a tuned entry: "
        f"{share / (whole or 1):.1%} of their time, {share:.1%} of the trace's"
    )
    missing = [problem for problem, is_tuned in tuned if not is_tuned]
    for problem in missing[:MOST_MISSING]:
        shapes = describe_shapes(problem.signature)
        print_line(f"{problem.share:>7.2%} {problem.calls:>7,}  {problem.name} {shapes}", sys.stdout)
    if len(missing) > MOST_MISSING:
        print(f"and {len(missing) - MOST_MISSING:,} more without")
    return 0
