"""`opgrip zoo show`: the model, contents and recipe of a trace of the zoo."""

from __future__ import annotations

import argparse
import shlex
import sys

from opgrip.cli.command import add_debug
from opgrip.cli.terminal import print_line
from opgrip.errors import MissingFileError
from opgrip.tools.verbs.verb import Verb, verbs
from opgrip.tools.verbs.zoo_list import NAMES
from opgrip.traces.zoo import PREFIX, ZooTrace, read_manifest, select, zoo_file

EXAMPLES = """\
examples:
  opgrip zoo show built-in_faster-rcnn.predict
  opgrip zoo show 'faster-rcnn*'
"""


def prepare(parser: argparse.ArgumentParser) -> None:
    """Add the options of the verb."""
    parser.add_argument("names", nargs="+", metavar="NAME", help=NAMES)
    add_debug(parser)


def run(args: argparse.Namespace) -> int:
    """Print facts about the trace."""
    for number, trace in enumerate(select(args.names, read_manifest())):
        if number:
            print()
        for name, value in facts(trace):
            if value:
                print_line(f"{name:<12}{value}", sys.stdout, indent=12)
    return 0


def facts(trace: ZooTrace) -> list[tuple[str, str]]:
    """Return names and texts of the facts about a trace."""
    lines = [
        ("name", trace.name),
        ("model", f"{trace.model} of {trace.library}, {trace.family}"),
        ("inputs", trace.inputs),
        ("remark", trace.remark),
        ("made by", shlex.join(["opcapture", *trace.arguments])),
    ]
    held = trace.recording
    if held is None:
        return [*lines, ("holds", f"nothing yet: opgrip zoo make {trace.name}")]
    return [
        *lines,
        ("with", ", ".join(f"{name} {number}" for name, number in held.versions.items())),
        ("on", held.machine),
        ("step", f"{held.step_ms:,.1f} ms unwatched, {held.steps} recorded"),
        ("calls", f"{held.calls:,} of {held.signatures:,} signatures of {held.operators:,} operators"),
        ("long tail", f"{held.longtail:,} functions"),
        ("file", f"{held.size_bytes:,} bytes, {_place(trace)}"),
        ("run it", f"opreplay {PREFIX}{trace.name}"),
    ]


def _place(trace: ZooTrace) -> str:
    try:
        return str(zoo_file(trace))
    except MissingFileError:
        return "not installed: the package opgrip-zoo has it"


verbs.register("zoo show")(
    Verb("show what a trace of the zoo holds and how it is made", EXAMPLES, prepare, run, needs_torch=False)
)
