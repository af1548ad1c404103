"""`opgrip zoo baseline`, `list`, `make` and `show`: the recorded traces of real models that ship with opgrip."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from opgrip.cli.command import counted, positive
from opgrip.cli.terminal import print_line
from opgrip.display.tables import TableColumn, print_table
from opgrip.errors import MissingFileError
from opgrip.tools.verbs import add_output, declare, verb
from opgrip.tools.verbs.results_options import add_run
from opgrip.traces.zoo import PREFIX, ZooTrace, read_manifest, select, zoo_file
from opgrip.traces.zoo.manifest import INSTALL

BASELINE_EXAMPLES = """\
examples:
  opreplay zoo --repeats 3 -o zoo.parquet
  opgrip zoo baseline zoo.parquet -o baseline.json.zst
  opreplay zoo --baseline baseline.json.zst
  opgrip zoo baseline mmseg.parquet --add-to baseline.json.zst -o both.json.zst

Only rows in eager mode are used, with values, threads, batch size and caches as in the program.
"""


@declare(
    "zoo baseline", "write the times of a replay as a baseline for scores", BASELINE_EXAMPLES, "corpus:run_baseline"
)
def prepare_baseline(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    add_output(parser, "baseline file to write: .json, .json.gz or .json.zst", required=True)
    parser.add_argument(
        "--add-to",
        type=Path,
        metavar="BASELINE",
        help="baseline of the same machine to extend; its traces are kept unless they were replayed again",
    )


LIST_EXAMPLES = """\
examples:
  opgrip zoo list
  opgrip zoo list mmdet two-stage       traces of a library or family
  opgrip zoo list '*.train'
  opgrip zoo list mmdet --distinct      number of distinct operators and long-tail functions
  opgrip zoo list | sort -t$'\\t' -k5nr   columns in a pipe under a line of names
"""
NAMES = "name, model, library or family of traces; wildcards are allowed"
# fields of a recording, in the order of the columns
NUMBERS = ("calls", "signatures", "operators", "longtail", "size_bytes")


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
    TableColumn("installed", lambda trace: _installed(trace)),
)


def prepare_list(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "names", nargs="*", metavar="GLOB", help="list only traces whose name, model, library or family matches"
    )
    parser.add_argument(
        "--distinct",
        action="store_true",
        help="load the traces and count distinct operators and functions over all of them; takes minutes",
    )


@verb("zoo list", "list the traces of the zoo", LIST_EXAMPLES, prepare_list, needs_torch=False)
def run_list(args: argparse.Namespace) -> int:
    traces = select(args.names, read_manifest())
    if args.distinct:
        from opgrip.zoo.making import count_distinct

        print(count_distinct(traces).line)
        return 0
    if not sys.stdout.isatty():
        print("name", "library", "family", *NUMBERS, "installed", sep="\t")
        for trace in traces:
            numbers = ["-" if trace.recording is None else getattr(trace.recording, name) for name in NUMBERS]
            print(trace.name, trace.library, trace.family, *numbers, _installed(trace), sep="\t")
        return 0
    print_table(COLUMNS, traces, sys.stdout)
    print(summary(traces))
    return 0


def summary(traces: Sequence[ZooTrace]) -> str:
    recordings = [trace.recording for trace in traces if trace.recording is not None]
    size = sum(recording.size_bytes for recording in recordings) / 1e6
    models = counted(len({trace.model for trace in traces}), "model")
    calls = counted(sum(recording.calls for recording in recordings), "call")
    missing = len(traces) - len(recordings)
    return f"{counted(len(traces), 'trace')} of {models}: {calls}, {size:.1f} MB" + (
        f"; {missing} not captured yet" if missing else ""
    )


MAKE_EXAMPLES = """\
examples:
  opgrip zoo make retinanet_r50.predict
  opgrip zoo make '*'                            all missing and outdated traces
  opgrip zoo make --check fast-scnn.predict      make it again and compare; exits with 1 if calls differ

exit status: 1 if a trace could not be made, or differs
"""


@declare("zoo make", "capture traces of the zoo, or check that they are reproducible", MAKE_EXAMPLES, "corpus:run_make")
def prepare_make(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="+", metavar="GLOB", help=NAMES)
    parser.add_argument("-f", "--force", action="store_true", help="record traces again even if they are up to date")
    parser.add_argument(
        "--check", action="store_true", help="make the traces in a temporary folder and compare them with the zoo"
    )
    parser.add_argument(
        "--timeout",
        type=positive,
        default=1800,
        metavar="S",
        help="time limit of a capture in seconds (default: %(default)s)",
    )


SHOW_EXAMPLES = """\
examples:
  opgrip zoo show built-in_faster-rcnn.predict
  opgrip zoo show 'faster-rcnn*'
"""


def prepare_show(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="+", metavar="NAME", help=NAMES)


@verb(
    "zoo show",
    "show what a trace of the zoo contains and how it was made",
    SHOW_EXAMPLES,
    prepare_show,
    needs_torch=False,
)
def run_show(args: argparse.Namespace) -> int:
    for number, trace in enumerate(select(args.names, read_manifest())):
        if number:
            print()
        for name, value in facts(trace):
            if value:
                print_line(f"{name:<12}{value}", sys.stdout, indent=12)
    return 0


def facts(trace: ZooTrace) -> list[tuple[str, str]]:
    lines = [
        ("name", trace.name),
        ("model", f"{trace.model} of {trace.library}, {trace.family}"),
        ("inputs", trace.inputs),
        ("remark", trace.remark),
        ("made by", shlex.join(["opcapture", *trace.arguments])),
    ]
    held = trace.recording
    if held is None:
        return [*lines, ("holds", f"not captured yet: run opgrip zoo make {trace.name}")]
    return [
        *lines,
        ("with", ", ".join(f"{name} {number}" for name, number in held.versions.items())),
        ("on", held.machine),
        ("step", f"{held.step_ms:,.1f} ms without capture, {held.steps} recorded"),
        ("calls", f"{held.calls:,} of {held.signatures:,} signatures of {held.operators:,} operators"),
        ("long tail", f"{held.longtail:,} functions"),
        ("file", f"{held.size_bytes:,} bytes, {_place(trace)}"),
        ("run it", f"opreplay {PREFIX}{trace.name}"),
    ]


def _installed(trace: ZooTrace) -> str:
    try:
        zoo_file(trace)
    except MissingFileError:
        return "no"
    return "yes"


def _place(trace: ZooTrace) -> str:
    try:
        return str(zoo_file(trace))
    except MissingFileError:
        return f"not installed: {INSTALL}"
