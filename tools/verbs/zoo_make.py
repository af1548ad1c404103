"""`opgrip zoo make`: making traces of the zoo again."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from time import monotonic

from opgrip.cli.command import add_debug, counted, positive
from opgrip.cli.progress import Reporter
from opgrip.errors import UserError
from opgrip.tools.verbs.verb import Verb, verbs
from opgrip.tools.verbs.zoo_list import NAMES, summary
from opgrip.traces.zoo import ZooTrace, read_manifest, select, zoo_file
from opgrip.zoo.making.making import write_manifest

EXAMPLES = """\
examples:
  opgrip zoo make retinanet_r50.predict
  opgrip zoo make '*'                            all that is not there yet, or has another recipe by now
  opgrip zoo make --check fast-scnn.predict      make it anew beside, and compare: 1 where calls differ

exit status: 1 where one could not be made, or differs
"""
DIFFERENCES = 10
"""maximum number of differing signatures reported per trace"""


def prepare(parser: argparse.ArgumentParser) -> None:
    """Add the options of the verb."""
    parser.add_argument("names", nargs="+", metavar="GLOB", help=NAMES)
    parser.add_argument("-f", "--force", action="store_true", help="also make traces that exist and are up to date")
    parser.add_argument(
        "--check", action="store_true", help="make them in a temporary folder, and compare them with those that ship"
    )
    parser.add_argument(
        "--timeout",
        type=positive,
        default=1800,
        metavar="S",
        help="end a capture that takes longer, in seconds (default: %(default)s)",
    )
    add_debug(parser)


def run(args: argparse.Namespace) -> int:
    """Make traces one after the other in separate processes, and write the manifest after each."""
    from opgrip.zoo.making import is_current

    reporter = Reporter(args.prog)
    traces = select(args.names, read_manifest())
    if args.check:
        return int(sum(_differs(trace, args.timeout, reporter) for trace in traces) > 0)
    due = [trace for trace in traces if args.force or not is_current(trace)]
    if len(due) < len(traces):
        reporter.say(f"{counted(len(traces) - len(due), 'trace')} there already")
    failures = [trace for trace in due if not _is_made(trace, args.timeout, reporter)]
    reporter.say(summary(select(args.names, read_manifest())))
    if failures:
        reporter.say(f"{counted(len(failures), 'trace')} could not be made")
    return int(bool(failures))


def _is_made(trace: ZooTrace, timeout_s: float, reporter: Reporter) -> bool:
    """Make a trace and report its figures; return True on success."""
    from opgrip.zoo.making import make_trace

    start = monotonic()
    try:
        with reporter.doing(f"making {trace.name}", measures=False):
            made = make_trace(trace, timeout_s=timeout_s)
    except UserError as error:
        reporter.say(f"error: {error}")
        return False
    _write_down(made)
    held = made.recording
    assert held is not None
    figures = (
        counted(held.calls, "call"),
        counted(held.signatures, "signature"),
        f"{held.size_bytes / 1e3:,.0f} kB",
        f"{monotonic() - start:.0f} s",
    )
    reporter.say(f"{trace.name}: {', '.join(figures)}")
    return True


def _write_down(made: ZooTrace) -> None:
    """Write a trace's recording to the current manifest.

    The manifest is read again, because making takes hours in which recipes may be edited.
    """
    traces: Sequence[ZooTrace] = read_manifest()
    write_manifest(
        replace(trace, recording=made.recording)
        if (trace.name, trace.arguments) == (made.name, made.arguments)
        else trace
        for trace in traces
    )


def _differs(trace: ZooTrace, timeout_s: float, reporter: Reporter) -> bool:
    """Return True if a trace that is made again differs from the shipped one, or cannot be made."""
    from opgrip.zoo.making import differences_anew

    try:
        with reporter.doing(f"making {trace.name} anew", measures=False):
            lines = differences_anew(trace, zoo_file(trace), timeout_s)
    except UserError as error:
        reporter.say(f"error: {error}")
        return True
    reporter.say(f"{trace.name}: {counted(len(lines), 'signature differs', 'signatures differ')}")
    for line in lines[:DIFFERENCES]:
        reporter.say(f"  {line}")
    return bool(lines)


verbs.register("zoo make")(
    Verb("make traces of the zoo again, or check that they come out the same", EXAMPLES, prepare, run)
)
