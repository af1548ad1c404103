"""`opgrip zoo list`: the traces of real models that ship."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from opgrip.cli.command import add_debug
from opgrip.cli.plural import counted
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
TEXTS = (("name", 30, 0), ("library", 12, 3), ("family", 12, 2))
NUMBERS = ("calls", "signatures", "operators", "longtail", "size_bytes")
"""Of a recording, in the order of the columns."""


def prepare(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument("names", nargs="*", metavar="GLOB", help=f"only those of {NAMES}")
    parser.add_argument(
        "--distinct", action="store_true", help="load them, and count what is distinct over all of them; takes minutes"
    )
    add_debug(parser)


def run(args: argparse.Namespace) -> int:
    """Print a line a trace; in a pipe, columns with tabs between them."""
    traces = select(args.names, read_manifest())
    if args.distinct:
        print(_distinct(traces))
        return 0
    is_terminal = sys.stdout.isatty()
    rows = [(trace.name, trace.library, trace.family, *_numbers(trace, is_terminal)) for trace in traces]
    if not is_terminal:
        sys.stdout.writelines("\t".join(row) + "\n" for row in rows)
        return 0
    cells = list(zip(*rows, strict=True))
    columns = [
        TableColumn(name, list(texts), is_number=False, least=least, rank=rank)
        for (name, least, rank), texts in zip(TEXTS, cells, strict=False)
    ]
    columns += [
        TableColumn(name.replace("size_bytes", "kB"), list(texts), rank=rank)
        for rank, (name, texts) in enumerate(zip(NUMBERS, cells[len(TEXTS) :], strict=True))
    ]
    print_table(columns, sys.stdout)
    print(summary(traces))
    return 0


def _distinct(traces: Sequence[ZooTrace]) -> str:
    from opgrip.zoo.making import count_distinct

    counts = count_distinct(traces)
    return (
        f"{counted(counts.operators, 'operator')}, {counts.extension_functions} of them functions of extensions, "
        f"and {counted(counts.longtail, 'long-tail function')} in {counted(counts.traces, 'trace')}"
    )


def _numbers(trace: ZooTrace, is_terminal: bool) -> list[str]:
    """Of its recording: with commas and the size in kB for a terminal, else plain and in bytes."""
    if trace.recording is None:
        return ["-"] * len(NUMBERS)
    numbers = [int(getattr(trace.recording, name)) for name in NUMBERS]
    if not is_terminal:
        return list(map(str, numbers))
    return [*(f"{number:,}" for number in numbers[:-1]), f"{numbers[-1] / 1e3:,.0f}"]


def summary(traces: Sequence[ZooTrace]) -> str:
    """What traces are together, in a line."""
    made = [trace.recording for trace in traces if trace.recording is not None]
    size = sum(recording.size_bytes for recording in made) / 1e6
    models = counted(len({trace.model for trace in traces}), "model")
    calls = counted(sum(recording.calls for recording in made), "call")
    missing = len(traces) - len(made)
    return f"{counted(len(traces), 'trace')} of {models}: {calls}, {size:.1f} MB" + (
        f"; {missing} not made yet" if missing else ""
    )


verbs.register("zoo list")(Verb("list the traces of real models that ship", EXAMPLES, prepare, run, needs_torch=False))
