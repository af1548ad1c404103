"""`opgrip trace timeline`: a trace for Perfetto."""

from __future__ import annotations

import argparse
import gzip
import sys
from pathlib import Path

from opgrip.cli.command import add_debug, add_reading, counted
from opgrip.cli.output_files import whole_file
from opgrip.cli.progress import Reporter
from opgrip.errors import UserError
from opgrip.tools.verbs.verb import Verb, verbs

EXAMPLES = """\
examples:
  opgrip trace timeline trace:faster_rcnn -o timeline.json.gz    open it in ui.perfetto.dev
  opgrip trace timeline step.jsonl | jq '.traceEvents[] | select(.cat == "module") | .name'
"""


def prepare(parser: argparse.ArgumentParser) -> None:
    """Add the options of the verb."""
    parser.add_argument("trace", type=Path, metavar="TRACE", help="a trace, or a file of another tool")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="a .json or .json.gz (default: standard output)"
    )
    parser.add_argument("-f", "--force", action="store_true", help="replace an existing file")
    add_reading(parser, "take what there is of a cut or damaged trace")
    add_debug(parser)


def run(args: argparse.Namespace) -> int:
    """Write the events."""
    from opgrip.traces import load
    from opgrip.traces.analysis.timeline import timeline_lines

    if args.output is not None and not args.output.name.endswith((".json", ".json.gz")):
        raise UserError(f"{args.output} is neither .json nor .json.gz", "name one of these")
    with Reporter(args.prog).reading(args.trace):
        trace = load(args.trace, args.partial, args.unbounded)
    if args.output is None:
        sys.stdout.writelines(timeline_lines(trace))
        return 0
    with whole_file(args.output, args.force) as file:
        if args.output.suffix == ".gz":
            with gzip.open(file, "wt", encoding="utf-8") as packed:
                packed.writelines(timeline_lines(trace))
        else:
            file.writelines(line.encode() for line in timeline_lines(trace))
    print(f"{counted(trace.call_count, 'call')}, in {args.output}: open it in ui.perfetto.dev", file=sys.stderr)
    return 0


verbs.register("trace timeline")(Verb("write a trace for Perfetto", EXAMPLES, prepare, run))
