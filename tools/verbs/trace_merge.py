"""`opgrip trace merge`: one trace from the traces of several processes."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from opgrip.cli.command import add_debug, add_reading
from opgrip.tools.verbs.verb import Verb, verbs

EXAMPLES = """\
examples:
  opgrip trace merge step.rank0.jsonl step.rank1.jsonl -o step.jsonl
  opgrip trace merge train.jsonl train.pid*.jsonl -o all.jsonl.zst    a program and its DataLoader workers
"""


def prepare(parser: argparse.ArgumentParser) -> None:
    """Add the options of the verb."""
    parser.add_argument("traces", type=Path, nargs="+", metavar="TRACE", help="files that opcapture wrote")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="the trace to write")
    parser.add_argument("-f", "--force", action="store_true", help="replace an existing file")
    add_reading(parser, "take what there is of cut and damaged traces")
    add_debug(parser)


def run(args: argparse.Namespace) -> int:
    """Merge the traces."""
    from opgrip.traces.analysis.merge import merge

    end = merge(args.traces, args.output, args.force, args.partial, args.unbounded)
    origin = f"{len(args.traces)} traces" if len(args.traces) > 1 else "one trace"
    print(
        f"{args.prog}: {end.calls:,} calls of {end.signatures:,} signatures from {origin}, to {args.output}",
        file=sys.stderr,
    )
    return 0


verbs.register("trace merge")(Verb("join the traces of several processes", EXAMPLES, prepare, run))
