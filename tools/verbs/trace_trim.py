"""`opgrip trace trim`: a part of a trace as a separate trace."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from opgrip.cli.command import add_debug, add_reading, counted
from opgrip.cli.progress import Reporter
from opgrip.tools.verbs.verb import Verb, verbs

EXAMPLES = """\
examples:
  opgrip trace trim trace:faster_rcnn -o step.jsonl --steps 1
  opgrip trace trim trace:faster_rcnn -o head.jsonl --module 'roi_head*' --with-producers
  opgrip trace trim train.jsonl -o backward.jsonl.gz --phase backward --time 1.5s:2s

A call belongs to the part where it has all that is named. So do the calls that a function made which belongs to it.
"""
NS_OF = {"ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9, "": 10**9}


def prepare(parser: argparse.ArgumentParser) -> None:
    """Add the options of the verb."""
    parser.add_argument("trace", type=Path, metavar="TRACE", help="a trace, or a file of another tool")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="the trace to write")
    parser.add_argument(
        "--steps", type=steps, metavar="FIRST[:END]", help="only these steps, counted from 0, end excluded: 1, 0:2, 2:"
    )
    parser.add_argument("--phase", action="append", default=[], choices=("forward", "backward", "optimizer"))
    parser.add_argument(
        "--module",
        action="append",
        default=[],
        metavar="PATTERN",
        help="only calls in modules that match, such as 'backbone.*'",
    )
    parser.add_argument(
        "--op", action="append", default=[], metavar="PATTERN", help="only operators that match, such as 'aten.index*'"
    )
    parser.add_argument(
        "--time",
        type=span,
        metavar="START:END",
        help="only calls that began in this interval since the start: 1.5s:2s, 100ms:, :20us",
    )
    parser.add_argument(
        "--with-producers", action="store_true", help="also keep the calls that produced the inputs of the others"
    )
    parser.add_argument("-f", "--force", action="store_true", help="replace an existing file")
    add_reading(parser, "take what there is of a cut or damaged trace")
    add_debug(parser)


def run(args: argparse.Namespace) -> int:
    """Write the part, and report its contents."""
    from opgrip.cli.output_files import check_writable
    from opgrip.traces.analysis.trimming import TracePart, trim

    check_writable(args.output, args.force)
    part = TracePart(args.steps, tuple(args.phase), tuple(args.module), tuple(args.op), args.time)
    with Reporter(args.prog).reading(args.trace):
        trimmed = trim(args.trace, args.output, part, args.with_producers, args.force, args.partial, args.unbounded)
    of_calls = f"{trimmed.calls:,} of {counted(trimmed.of_calls, 'call')}"
    of_signatures = f"{trimmed.signatures:,} of {counted(trimmed.of_signatures, 'signature')}"
    print(f"{args.prog}: {of_calls}, {of_signatures}, to {args.output}", file=sys.stderr)
    if trimmed.producers:
        print(f"{args.prog}: {counted(trimmed.producers, 'call')} of these made what others read", file=sys.stderr)
    if trimmed.cut_edges:
        edges = counted(trimmed.cut_edges, "time")
        print(f"{args.prog}: {edges} a call reads what one made that is left out", file=sys.stderr)
    return 0


def steps(text: str) -> tuple[int, int | None]:
    """Parse a range of steps: `1`, `0:2`, `2:` or `:2`."""
    match = re.fullmatch(r"(\d{1,9})|(\d{0,9}):(\d{0,9})", text.strip(), re.ASCII)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no step and no range of steps such as 0:2")
    if match[1]:
        return int(match[1]), int(match[1]) + 1
    first, end = int(match[2] or 0), int(match[3]) if match[3] else None
    if end is not None and end <= first:
        raise argparse.ArgumentTypeError(f"{text!r} holds no step")
    return first, end


def span(text: str) -> tuple[int, int | None]:
    """Parse a time span `START:END`, in seconds or with units."""
    first, colon, end = text.partition(":")
    if not colon:
        raise argparse.ArgumentTypeError(f"{text!r} is no span of time such as 1.5s:2s")
    begin, until = _nanoseconds(first or "0"), _nanoseconds(end) if end else None
    if until is not None and until <= begin:
        raise argparse.ArgumentTypeError(f"{text!r} ends before it starts")
    return begin, until


def _nanoseconds(text: str) -> int:
    match = re.fullmatch(r"(-?\d{1,12}(?:\.\d{1,9})?)\s*(ns|us|ms|s|)", text.strip(), re.ASCII)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no time such as 1.5s or 20ms")
    return round(float(match[1]) * NS_OF[match[2]])


verbs.register("trace trim")(Verb("write a part of a trace: steps, phases, modules, operators", EXAMPLES, prepare, run))
