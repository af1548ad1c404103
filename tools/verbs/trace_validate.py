"""`opgrip trace validate`: errors in traces."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from opgrip.cli.command import UNBOUNDED_HELP, add_debug, counted, positive, printable
from opgrip.cli.output_files import check_writable, whole_file
from opgrip.cli.progress import Reporter
from opgrip.tools.verbs.verb import Verb, verbs

if TYPE_CHECKING:
    from opgrip.traces.analysis.validation import Validation

EXAMPLES = """\
examples:
  opgrip trace validate trace:faster_rcnn
  opgrip trace validate traces/*.jsonl.gz -o findings.json

exit status: 1 where something is wrong
"""


def prepare(parser: argparse.ArgumentParser) -> None:
    """Add the options of the verb."""
    parser.add_argument("traces", type=Path, nargs="+", metavar="TRACE", help="a trace, or a file of another tool")
    parser.add_argument(
        "--top", type=positive, default=50, metavar="N", help="findings to show per trace (default: %(default)s)"
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write all findings as JSON")
    parser.add_argument("-f", "--force", action="store_true", help="replace an existing file")
    parser.add_argument("--unbounded", action="store_true", help=UNBOUNDED_HELP)
    add_debug(parser)


def run(args: argparse.Namespace) -> int:
    """Print one line per error."""
    from opgrip.traces.analysis.validation import validate

    if args.output is not None:
        check_writable(args.output, args.force)
    validations = []
    for path in args.traces:
        with Reporter(args.prog).reading(path):
            validations.append(validate(path, args.unbounded))
        _print(validations[-1], args.top)
    if args.output is not None:
        with whole_file(args.output, args.force) as file:
            file.write(json.dumps([item.as_json() for item in validations], indent=1).encode())
    return int(any(item.counts for item in validations))


def _print(validation: Validation, top: int) -> None:
    path = printable(validation.path)
    for finding in validation.findings[:top]:
        print(f"{path}: record {finding.record}: {finding.kind}: {printable(finding.message)}")
    total = sum(validation.counts.values())
    if total > top:
        print(f"{path}: and {total - top:,} others")
    for note in validation.notes:
        print(f"{path}: {printable(note)}", file=sys.stderr)
    print(f"{path}: {counted(validation.records, 'record')}, {counted(total, 'finding') if total else 'nothing wrong'}")


verbs.register("trace validate")(Verb("find what is wrong in traces", EXAMPLES, prepare, run))
