"""`opgrip zoo list`: the traces of real models that ship."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from opgrip.cli.command import add_debug, counted
from opgrip.display.tables import TableColumn, print_table
from opgrip.tools.verbs.verb import Verb, verbs
from opgrip.traces.zoo import ZooTrace, read_manifest, select

EXAMPLES = """\
examples:
  opgrip zoo list
  opgrip zoo list mmdet two-stage       of that library or family
  opgrip zoo list '*.train'
  opgrip zoo list mmdet --distinct      how many operators and long-tail functions they have together
  opgrip zoo list | sort -t$'\\t' -k5nr   columns in a pipe: name, library, family, and numbers
"""
NAMES = "a name, model, library or family, with wildcards"
NUMBERS = ("calls", "signatures", "operators", "longtail", "size_bytes")
"""fields of a recording, in the order of the columns"""


def _number(name: str, heading: str = "", rank: int = 0, unit: int = 1) -> TableColumn:
    def value(trace: ZooTrace) -> float | None:
        return None if trace.recording is None else getattr(trace.recording, name) / unit

    return TableColumn(heading or name, value, ",.0f", rank)


COLUMNS = (
    TableColumn("name", "name", least=30),
    TableColumn("library", "library", least=12, rank=3),
    TableColumn("family", "family", least=12, rank=2),
    _number("calls"),
    _number("signatures", rank=1),
    _number("operators", rank=2),
    _number("longtail", rank=3),
    _number("size_bytes", "kB", rank=4, unit=1000),
)


def prepare(parser: argparse.ArgumentParser) -> None:
    """Add the options of the verb."""
    parser.add_argument("names", nargs="*", metavar="GLOB", help=f"only those of {NAMES}")
    parser.add_argument(
        "--distinct",
        action="store_true",
        help="load the traces and count distinct operators and functions over all of them; takes minutes",
    )
    add_debug(parser)


def run(args: argparse.Namespace) -> int:
    """Print one line per trace, with tab-separated columns in a pipe."""
    traces = select(args.names, read_manifest())
    if args.distinct:
        print(_distinct(traces))
        return 0
    if not sys.stdout.isatty():
        for trace in traces:
            print(trace.name, trace.library, trace.family, *_numbers(trace), sep="\t")
        return 0
    print_table(COLUMNS, traces, sys.stdout)
    print(summary(traces))
    return 0


def _distinct(traces: Sequence[ZooTrace]) -> str:
    from opgrip.zoo.making import count_distinct

    counts = count_distinct(traces)
    return (
        f"{counted(counts.operators, 'operator')}, {counts.extension_functions} of them functions of extensions, "
        f"and {counted(counts.longtail, 'long-tail function')} in {counted(counts.traces, 'trace')}"
    )


def _numbers(trace: ZooTrace) -> list[object]:
    return ["-" if trace.recording is None else getattr(trace.recording, name) for name in NUMBERS]


def summary(traces: Sequence[ZooTrace]) -> str:
    """Return a one-line summary of traces."""
    made = [trace.recording for trace in traces if trace.recording is not None]
    size = sum(recording.size_bytes for recording in made) / 1e6
    models = counted(len({trace.model for trace in traces}), "model")
    calls = counted(sum(recording.calls for recording in made), "call")
    missing = len(traces) - len(made)
    return f"{counted(len(traces), 'trace')} of {models}: {calls}, {size:.1f} MB" + (
        f"; {missing} not made yet" if missing else ""
    )


verbs.register("zoo list")(Verb("list the traces of real models that ship", EXAMPLES, prepare, run, needs_torch=False))
