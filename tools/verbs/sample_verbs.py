"""`opgrip longtail`, `grip` and `samples`: find long-tail functions, extract them, and list the samples that ship."""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

from opgrip.capture.program.capture_choices import CALLS, GRIPS
from opgrip.cli.command import USAGE_ERROR, add_reading, counted, positive, printable
from opgrip.cli.output_files import check_output
from opgrip.cli.progress import Reporter
from opgrip.display.tables import TableColumn, print_table
from opgrip.errors import UserError
from opgrip.tools.verbs import add_output, add_top, report_output, verb

if TYPE_CHECKING:
    from opgrip.traces import Trace

GRIP_EXAMPLES = """\
examples:
  opgrip grip train.py --function bbox2delta    a function of the script, into grips/bbox2delta
  opgrip grip train.py --function 'mmdet.models.*:*Coder.decode' -- --epochs 1
  opgrip grip detect.py --function mmdet.structures.bbox:bbox_overlaps --by-reference
"""


def prepare_grip(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("script", metavar="SCRIPT", help="Python script to run; its arguments follow --")
    parser.add_argument(
        "--function",
        action="append",
        required=True,
        metavar="NAME",
        help="function to record: its name in the script, or module:function; wildcards are allowed; can be repeated",
    )
    parser.add_argument(
        "--to", type=Path, default=Path(GRIPS), metavar="FOLDER", help="folder for the samples (default: %(default)s)"
    )
    parser.add_argument(
        "--calls",
        type=positive,
        default=CALLS,
        metavar="N",
        help="number of calls to keep per function (default: %(default)s)",
    )
    parser.add_argument(
        "--per-signature",
        type=positive,
        default=1,
        metavar="N",
        help="number of these calls that may have the same signature (default: %(default)s)",
    )
    parser.add_argument(
        "--by-reference", action="store_true", help="refer to functions by import path instead of copying their code"
    )


@verb(
    "grip", "run a script, and write functions that it calls as samples", GRIP_EXAMPLES, prepare_grip, runs_program=True
)
def run_grip(args: argparse.Namespace) -> int:
    from opgrip.capture.command.script import check_script, run_script
    from opgrip.capture.grip.gripped import Keep
    from opgrip.capture.grip.gripping import Grips
    from opgrip.capture.grip.patterns import parse_pattern

    program = [args.script, *args.program]
    check_script(program)
    patterns = [parse_pattern(name if ":" in name else f"__main__:{name}") for name in args.function]
    grips = Grips(patterns, Keep(args.calls, args.per_signature, by_reference=args.by_reference), args.to)
    with grips:
        status = run_script(program, grips.script_compiler())
    grips.finish()
    for folder in grips.written:
        print(f"opgrip grip: wrote a sample to {folder}: run it with pytest", file=sys.stderr)
    for name, reason in grips.refused.items():
        print(f"opgrip grip: error: {printable(name)} was not gripped: {printable(reason)}", file=sys.stderr)
    return status or (USAGE_ERROR if grips.refused else 0)


LONGTAIL_EXAMPLES = """\
examples:
  opgrip longtail trace:faster_rcnn
  opgrip longtail traces/*.jsonl.gz --top 50 -o longtail.csv    of several models
  opgrip longtail step.jsonl --bandwidth 3350                   estimate for memory with 3,350 GB/s
"""


def prepare_longtail(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("traces", type=Path, nargs="+", metavar="TRACE", help="a trace, or a file of another tool")
    add_top(parser, 30)
    parser.add_argument(
        "--bandwidth",
        type=gigabytes,
        metavar="GB/S",
        help="memory bandwidth with which savings are estimated (default: measured on the device of each trace)",
    )
    add_output(parser, "write all rows to this file: .json or .csv")
    add_reading(parser)


@verb("longtail", "rank functions that run as many small operators", LONGTAIL_EXAMPLES, prepare_longtail)
def run_longtail(args: argparse.Namespace) -> int:
    from opgrip.capture.command.opcapture import own_cost
    from opgrip.traces.analysis.longtail import bandwidth_of, find_longtail, print_longtail, write_rows

    check_output(args.output, args.force, (".json", ".csv"))
    bandwidth = bandwidth_of if args.bandwidth is None else lambda trace: args.bandwidth
    longtail = find_longtail(_load(args.traces, args, Reporter(args.prog)), bandwidth, own_cost())
    print_longtail(longtail, args.top, sys.stdout)
    if args.output is not None:
        write_rows(longtail, args.output, args.force)
        report_output(args, counted(len(longtail.functions), "function"))
    return 0


def _load(paths: Iterable[Path], args: argparse.Namespace, reporter: Reporter) -> Iterator[Trace]:
    from opgrip.traces import load

    for path in paths:
        with reporter.reading(path):
            trace = load(path, args.partial, args.unbounded)
        if not trace.distinct_calls["function"].notna().any():
            raise UserError(
                f"{path} does not contain the Python functions that made its calls", "record the program with opcapture"
            )
        yield trace


def gigabytes(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a bandwidth in GB/s above 0")
    return number * 1e9


LIST_EXAMPLES = """\
examples:
  opgrip samples list
  opgrip samples list --tag ForLoop --tag InputAware    samples with both tags
  opgrip samples list --source mmdetection '*_loss'
"""
COLUMNS = (
    TableColumn("name", itemgetter(0), least=30),
    TableColumn("family", itemgetter(1), least=10, rank=1),
    TableColumn("tags", itemgetter(2), least=24),
    TableColumn("project", itemgetter(3), rank=2),
    TableColumn("", itemgetter(4)),
)


def prepare_list(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="GLOB", help="list only samples whose names match")
    parser.add_argument(
        "--tag", action="append", default=[], metavar="TAG", help="list only samples with this tag; can be repeated"
    )
    parser.add_argument(
        "--source",
        metavar="TEXT",
        help="list only samples from projects whose name or URL contains this text or pattern",
    )


@verb("samples list", "list the samples of the package", LIST_EXAMPLES, prepare_list)
def run_list(args: argparse.Namespace) -> int:
    from opgrip.replay.cases.sources.samples import find_samples

    samples = find_samples(patterns=args.names, tags=args.tag)
    if not samples:
        raise UserError("no sample matches these names and tags", "opgrip samples list shows all")
    if args.source is not None:
        pattern = f"*{args.source.lower()}*"
        samples = [item for item in samples if fnmatchcase(f"{item.project} {item.url}".lower(), pattern)]
        if not samples:
            raise UserError(f"no sample is from {args.source!r}", "opgrip samples list shows all projects")
    rows = [
        (
            sample.name,
            sample.family,
            " ".join(sorted(tag.value for tag in sample.tags)),
            sample.project,
            "jax" if sample.has_jax() else "",
        )
        for sample in samples
    ]
    if not sys.stdout.isatty():
        sys.stdout.writelines("\t".join(row) + "\n" for row in rows)
        return 0
    print_table(COLUMNS, rows, sys.stdout)
    print(counted(len(rows), "sample"))
    return 0


SHOW_EXAMPLES = """\
examples:
  opgrip samples show delta2bbox
  opgrip samples show nms | less
"""


def prepare_show(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="name of the sample")


@verb("samples show", "show the description, inputs and source of a sample", SHOW_EXAMPLES, prepare_show)
def run_show(args: argparse.Namespace) -> int:
    from opgrip.replay.cases.sources.samples import PREFIX, find_samples
    from opgrip.tools.exports.candidate_template import outlines

    (sample,) = find_samples(args.name)
    print(f"name      {sample.name}, in {sample.family}")
    print(f"tags      {' '.join(sorted(tag.value for tag in sample.tags)) or 'none'}")
    print(f"source    {sample.project}, {sample.url}")
    print(f"in JAX    {'yes' if sample.has_jax() else 'no'}")
    for configuration in sample.configurations:
        print(f"inputs    {configuration}: {outlines(sample.arguments(configuration), {})}")
    print(f"run it    opreplay {PREFIX}{sample.name} --mode eager,compile\n")
    print(inspect.getsource(sys.modules[sample.function.__module__]), end="")
    return 0


TAGS_EXAMPLES = """\
examples:
  opgrip samples tags
"""


@verb("samples tags", "list the tags of samples, with the number of samples that have each", TAGS_EXAMPLES)
def run_tags(args: argparse.Namespace) -> int:
    from opgrip.samples import Tag, samples

    for tag in Tag:
        count = sum(tag in sample.tags for sample in samples().values())
        print(f"{tag.value:<20}{count:>5}  {tag.meaning}")
    return 0
