"""`opgrip trace cat`: the records of a trace as lines."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from opgrip.cli.case_slices import Cut
from opgrip.cli.command import add_debug, add_reading, printable
from opgrip.cli.options import add_options, from_arguments
from opgrip.errors import UserError
from opgrip.tools.verbs.verb import Verb, verbs

EXAMPLES = """\
examples:
  opgrip trace cat trace:faster_rcnn | less
  opgrip trace cat trace:faster_rcnn --type calls --op 'aten.topk*' --module 'rpn_head*'
  opgrip trace cat step.jsonl.zst --type signature --json | jq .op
"""
TYPES = (
    *("header", "signature", "observed", "effects", "values", "scope", "context", "thread", "calls", "device_times"),
    *("kernels", "entered", "end"),
)


def prepare(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument("trace", type=Path, metavar="TRACE", help="a trace, or a file of another tool")
    parser.add_argument(
        "--type", action="append", default=[], choices=TYPES, metavar="TYPE", help=f"of records: {', '.join(TYPES)}"
    )
    parser.add_argument(
        "--op", action="append", default=[], metavar="PATTERN", help="calls and records of operators that match"
    )
    parser.add_argument(
        "--module", action="append", default=[], metavar="PATTERN", help="calls and scopes of modules that match"
    )
    parser.add_argument("--json", action="store_true", help="records as the file has them; filtered calls one by one")
    add_options(parser, Cut)
    add_reading(parser, "do not fail where the trace is cut or damaged")
    add_debug(parser)


def run(args: argparse.Namespace) -> int:
    """Print the records, as they are read."""
    from opgrip.traces.analysis.listing import Filter, list_records
    from opgrip.traces.io.reader import TraceReader

    reader = TraceReader(args.trace, args.unbounded, cut=from_arguments(Cut, args))
    chosen = Filter(tuple(args.type), tuple(args.op), tuple(args.module))
    for line in list_records(iter(reader), chosen, args.json):
        sys.stdout.write(f"{line if args.json else printable(line)}\n")
    if reader.missing and not args.partial:
        sys.stdout.flush()
        raise UserError(reader.missing, "--partial takes it so")
    return 0


verbs.register("trace cat")(Verb("print the records of a trace, one a line", EXAMPLES, prepare, run))
