"""`opgrip grip`: run a script, and write samples of some of its functions."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from opgrip.capture.program.capture_choices import CALLS, GRIPS
from opgrip.cli.command import USAGE_ERROR, add_debug, positive, printable
from opgrip.tools.verbs.verb import Verb, verbs

EXAMPLES = """\
examples:
  opgrip grip train.py --function bbox2delta    a function of the script, to grips/bbox2delta
  opgrip grip train.py --function 'mmdet.models.*:*Coder.decode' -- --epochs 1
  opgrip grip detect.py --function mmdet.structures.bbox:bbox_overlaps --by-reference
"""


def prepare(parser: argparse.ArgumentParser) -> None:
    """Add the options of the verb."""
    parser.add_argument("script", metavar="SCRIPT", help="the program to run; after --, its own arguments")
    parser.add_argument(
        "--function",
        action="append",
        required=True,
        metavar="NAME",
        help="functions to grip: names in the script, or module:function, with wildcards; can be repeated",
    )
    parser.add_argument(
        "--to", type=Path, default=Path(GRIPS), metavar="FOLDER", help="folder for the samples (default: %(default)s)"
    )
    parser.add_argument(
        "--calls",
        type=positive,
        default=CALLS,
        metavar="N",
        help="number of calls to keep per function, each with another signature (default: %(default)s)",
    )
    parser.add_argument(
        "--by-reference", action="store_true", help="keep the import paths of functions instead of their code"
    )
    add_debug(parser)


def run(args: argparse.Namespace) -> int:
    """Run the script, and write the samples."""
    from opgrip.capture.command.script import check_script, run_script
    from opgrip.capture.grip.gripped import Keep
    from opgrip.capture.grip.gripping import Grips
    from opgrip.capture.grip.patterns import parse_pattern

    program = [args.script, *args.program]
    check_script(program)
    patterns = [parse_pattern(name if ":" in name else f"__main__:{name}") for name in args.function]
    grips = Grips(patterns, Keep(args.calls, by_reference=args.by_reference), args.to)
    with grips:
        status = run_script(program, grips.script_compiler())
    grips.finish()
    for folder in grips.written:
        print(f"opgrip grip: a sample in {folder}: run it with pytest", file=sys.stderr)
    for name, reason in grips.refused.items():
        print(f"opgrip grip: error: {printable(name)} was not gripped: {printable(reason)}", file=sys.stderr)
    return status or (USAGE_ERROR if grips.refused else 0)


verbs.register("grip")(Verb("run a script, and make samples of some of its functions", EXAMPLES, prepare, run, True))
