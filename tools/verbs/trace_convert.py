"""`opgrip trace convert`, `export-case` and `tuner`: write files for other tools, and scripts."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opgrip.cli.command import add_reading, counted, did_you_mean, printable
from opgrip.cli.option_types import Cut
from opgrip.cli.options import add_options, from_arguments
from opgrip.cli.output_files import (
    check_output,
    check_writable,
    compress_to,
    whole_file,
    whole_folder,
    write_json,
    write_text,
)
from opgrip.cli.progress import Reporter
from opgrip.cli.terminal import print_line
from opgrip.errors import UserError
from opgrip.tools.verbs import add_capture, add_output, report_output, verb

if TYPE_CHECKING:
    from opgrip.cli.plugins import Registry
    from opgrip.traces.formats.tuners import Problem, Tuner
    from opgrip.traces.io.foreign_files import Format, Losses
    from opgrip.traces.io.reader import TraceReader

OWN = "opgrip"
OWN_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
CONVERT_EXAMPLES = """\
examples:
  opgrip trace convert --formats                                  the formats that can be read or written
  opgrip trace convert inputs.txt calls.jsonl                     the format is detected by content
  opgrip trace convert trace:faster_rcnn inputs.txt --to tritonbench
  opgrip trace convert step.jsonl inputs.txt --report loss.json   also list what inputs.txt does not contain
  opgrip trace convert ranges.json some.jsonl --sample 100        100 of the million cases that ranges.json describes
"""


def prepare_convert(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("input", type=Path, metavar="IN", help="a trace, or a file of another tool")
    parser.add_argument(
        "output", type=Path, metavar="OUT", help="file to write, or new folder for the format flashinfer"
    )
    parser.add_argument(
        "--formats", action=_ListFormats, nargs=0, help="list the formats that can be read or written, and exit"
    )
    parser.add_argument(
        "--from",
        dest="source",
        metavar="FORMAT",
        help="format of IN, one of --formats (default: detected from its content)",
    )
    parser.add_argument("--to", metavar="FORMAT", help="format of OUT, one of --formats (default: from its suffix)")
    add_capture(parser)
    add_options(parser, Cut)
    parser.add_argument(
        "--report",
        type=Path,
        metavar="FILE",
        help="also write a JSON file that lists the calls that were not converted, and which facts about the converted "
        "calls OUT does not contain",
    )
    parser.add_argument("-f", "--force", action="store_true", help="replace an existing file")
    add_reading(parser)


@verb("trace convert", "convert between traces and files of other tools", CONVERT_EXAMPLES, prepare_convert)
def run_convert(args: argparse.Namespace) -> int:
    from opgrip.traces.io.reader import TraceReader

    target = _format_named(args.to) if args.to else _format_of_name(args.output)
    names = _written()
    if target not in names:
        choice = f"choose one of {', '.join(names)}"
        raise UserError(f"{target} is not a writable format", did_you_mean(target, names, choice))
    format_ = _formats().get(target)
    if format_ is None or format_.write_folder is None:
        check_writable(args.output, args.force)
    check_output(args.report, args.force)
    cut = from_arguments(Cut, args)
    source = _format_named(args.source) if args.source else OWN
    reader = TraceReader(args.input, args.unbounded, source if source != OWN else None, cut, args.capture)
    if format_ is None:
        _write_own(reader, args)
    else:
        _write_foreign(reader, format_, args)
    if args.report is not None:
        write_json(reader.losses.as_json(), args.report, args.force)
    _print_losses(args, reader.losses)
    return 0


def _formats() -> Registry[Format]:
    from opgrip.traces.io.foreign_files import formats

    return formats


def _write_own(reader: TraceReader, args: argparse.Namespace) -> None:
    from opgrip.traces.io.writer import TraceWriter
    from opgrip.traces.schema.records import Header

    records = iter(reader)
    header = next(records)
    assert isinstance(header, Header)
    with TraceWriter(args.output, header, args.force) as writer:
        for record in records:
            writer.write(record)
        if reader.missing and not args.partial:
            raise UserError(reader.missing, "convert it with --partial")


def _write_foreign(reader: TraceReader, format_: Format, args: argparse.Namespace) -> None:
    from opgrip.traces import load

    trace = load(args.input, args.partial, args.unbounded, reader)
    if format_.write_folder is not None:
        with whole_folder(args.output) as folder:
            format_.write_folder(trace, folder, reader.losses)
        return
    assert format_.write is not None
    with whole_file(args.output, args.force) as raw:
        packed = args.output.suffix in (".gz", ".zst")
        sink = compress_to(raw, args.output.name) if packed else raw
        format_.write(trace, sink, reader.losses)  # type: ignore[arg-type]
        if packed:
            sink.close()


def _written() -> list[str]:
    return [OWN, *(name for name, format_ in _formats().items() if format_.is_written)]


def _format_named(word: str) -> str:
    name = word.lower().replace("-", "_")
    return name if name == OWN or _formats().get(name) else word


def _format_of_name(path: Path) -> str:
    if path.name.endswith(OWN_SUFFIXES):
        return OWN
    name = path.stem if path.suffix in (".gz", ".zst") else path.name
    matches = [
        (len(suffix), key) for key, item in _formats().items() for suffix in item.suffixes if name.endswith(suffix)
    ]
    if matches:
        return max(matches)[1]
    if path.is_dir():
        raise UserError(f"{path} is a folder", "write a file, or a new folder with --to flashinfer")
    names = ", ".join(_written())
    if (suffix := path.suffix.removeprefix(".")) in set(_formats().names()) - set(_written()):
        raise UserError(f"{path} cannot be written: .{suffix} files can only be read", f"choose one of {names}")
    raise UserError(
        f"{path} has an unknown suffix", f"name a .jsonl file to write a trace, or give the format with --to ({names})"
    )


class _ListFormats(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from opgrip.display.tables import TableColumn, print_table

        rows = [(OWN, "read, written", ", ".join(OWN_SUFFIXES), "traces of opcapture")]
        for name, item in _formats().items():
            ways = ("read" if item.read is not None else "", "written" if item.is_written else "")
            rows.append((name, ", ".join(filter(None, ways)), ", ".join(item.suffixes), item.summary))
        headings = ("format", "access", "suffixes", "description")
        columns = [TableColumn(heading, itemgetter(place)) for place, heading in enumerate(headings)]
        print_table(columns, rows, sys.stdout)
        parser.exit()


def _print_losses(args: argparse.Namespace, losses: Losses) -> None:
    print(f"{args.prog}: wrote {args.output}", file=sys.stderr)
    for default in (*losses.doubts, *losses.defaults):
        print(f"{args.prog}: {default}", file=sys.stderr)
    for (op, reason), count in losses.skipped.most_common(5):
        print(
            f"{args.prog}: {counted(count, 'call')} of {printable(op)} not converted: {printable(reason)}",
            file=sys.stderr,
        )
    if len(losses.skipped) > 5:
        print(f"{args.prog}: more operators were not converted: --report FILE lists all", file=sys.stderr)
    for what, count in losses.counts.most_common(5):
        print(f"{args.prog}: {counted(count, 'call')} lost {what}", file=sys.stderr)


CALL, UNITS = "call", ("call", "module", "function")
MODE = re.compile(r"eager|compile(-dynamic)?(:[A-Za-z0-9_]+)?")
EXPORT_EXAMPLES = """\
examples:
  opgrip trace export-case trace:faster_rcnn 17 -o case.py && python case.py
  opgrip trace export-case step.jsonl 17 --mode compile -o case.py        compares the compiled call with eager
  opgrip trace export-case step.jsonl blocks.0 --unit module --mode compile -o repro.py
  opgrip trace export-case step.jsonl 'blocks.0 backward' --unit module --mode compile:aot_eager -o repro.py
  opgrip trace export-case grips/Block_forward 0 --mode compile -o repro.py     from source, kept by opcapture --grip
"""


def prepare_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "trace", type=Path, metavar="TRACE", help="a trace, a file of another tool, or a folder of a gripped sample"
    )
    parser.add_argument(
        "case",
        metavar="CASE",
        help="number of the case in opreplay --list; with --unit, name of the module or function as in the rows of "
        "opreplay; for a sample, number of its call, from 0",
    )
    parser.add_argument(
        "--unit",
        choices=UNITS,
        default=CALL,
        help="what to export: one call, or all recorded operators of a module or function, as one function "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--mode",
        type=_mode,
        default="eager",
        metavar="MODE",
        help="mode in which the script runs the case, in addition to eager: eager, compile, compile-dynamic or "
        "compile:BACKEND (default: %(default)s)",
    )
    add_output(parser, ".py file to write", required=True)
    add_options(parser, Cut)
    add_reading(parser)


def _mode(text: str) -> str:
    if MODE.fullmatch(text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not eager, compile, compile-dynamic or compile:BACKEND")
    return text


@verb("trace export-case", "write a case as a Python script that only needs torch", EXPORT_EXAMPLES, prepare_export)
def run_export(args: argparse.Namespace) -> int:
    from opgrip.tools.exports.exported_cases import export_case, export_sample, export_unit
    from opgrip.traces import TraceReader, load
    from opgrip.traces.io.sample_folder import SAMPLE, read_sample

    if args.output.suffix != ".py":
        raise UserError(f"{args.output} is not a Python file", "use the suffix .py")
    check_writable(args.output, args.force)
    if (args.trace / SAMPLE).is_file():
        what, source = export_sample(read_sample(args.trace), _number(args.case), args.mode)
    else:
        number = _number(args.case) if args.unit == CALL else 0
        with Reporter(args.prog).reading(args.trace):
            reader = TraceReader(args.trace, args.unbounded, cut=from_arguments(Cut, args))
            trace = load(args.trace, args.partial, args.unbounded, reader)
        if args.unit == CALL:
            what, source = f"signature {number}", export_case(trace, number, args.mode)
        else:
            what, source = export_unit(trace, args.case, args.unit, args.mode)
    with whole_file(args.output, args.force) as file:
        file.write(source.encode())
    report_output(args, what)
    print(f"{args.prog}: run it with: python {args.output}", file=sys.stderr)
    return 0


def _number(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > 18:
        raise UserError(f"{text[:40]!r} is not the number of a case", "see opreplay --list, or add --unit module")
    return int(text)


TUNER_NAMES = ("aiter", "tunableop", "hipblaslt", "benchdnn", "triton")
MOST_MISSING = 10
TUNER_EXAMPLES = """\
examples:
  opgrip trace tuner step.jsonl --for aiter -o untuned.csv
  opgrip trace tuner step.jsonl --for tunableop -o tunableop_untuned0.csv
  opgrip trace tuner step.jsonl --tuned tunableop_results0.csv     which share of the time has a tuned entry
"""


def prepare_tuner(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", type=Path, metavar="TRACE", help="a trace, or a file of another tool")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--for", dest="tuner", choices=TUNER_NAMES, help="tuner for which to list the recorded shapes")
    what.add_argument(
        "--tuned",
        type=Path,
        metavar="FILE",
        help="print the share of the time taken by calls whose shapes have an entry in this file, which a tuner wrote",
    )
    add_output(
        parser, "file for the list; lists of other kinds go next to it, with the kind in the name (default: stdout)"
    )
    add_reading(parser)


@verb(
    "trace tuner",
    "write recorded shapes for tuners of kernels, or find which are already tuned",
    TUNER_EXAMPLES,
    prepare_tuner,
)
def run_tuner(args: argparse.Namespace) -> int:
    check_output(args.output, args.force)
    if args.output is not None and args.tuned is not None:
        raise UserError("--tuned writes no file", "leave -o out")

    from opgrip.traces import TraceReader, load
    from opgrip.traces.formats.tuners import TUNERS, lists_of, problems_of, read_tuned

    tuned = None if args.tuned is None else read_tuned(args.tuned)
    with Reporter(args.prog).reading(args.trace):
        trace = load(args.trace, args.partial, args.unbounded, TraceReader(args.trace, args.unbounded))
    problems = problems_of(trace)
    if tuned is not None:
        return _report_tuned(problems, *tuned)
    lists, skipped = lists_of(problems, TUNERS[args.tuner])
    for (name, reason), count in skipped.most_common():
        print(f"{args.prog}: {counted(count, 'call')} of {name} left out: {reason}", file=sys.stderr)
    if not lists:
        raise UserError(f"{args.trace} has no calls that {args.tuner} tunes", "see opgrip trace info")
    for place, (group, lines) in enumerate(lists.items()):
        if args.output is None:
            print("\n".join(lines if len(lists) == 1 else [f"# {group or 'gemm'}", *lines]))
            continue
        path = args.output.with_name(f"{args.output.stem}_{group}{args.output.suffix}") if place else args.output
        write_text("\n".join([*lines, ""]), path, args.force)
        print(f"{args.prog}: wrote the list {group or 'gemm'} to {path}", file=sys.stderr)
    return 0


def _report_tuned(problems: Sequence[Problem], tuner: Tuner, rows: Sequence[Mapping[str, str]]) -> int:
    from opgrip.replay.results.results import describe_shapes
    from opgrip.traces.formats.tuners import tuned_of

    tuned = tuned_of(problems, tuner, rows)
    share = sum(problem.share for problem, is_tuned in tuned if is_tuned)
    whole = sum(problem.share for problem, _ in tuned)
    print(
        f"{sum(is_tuned for _, is_tuned in tuned):,} of {counted(len(tuned), 'shape')} have a tuned entry: "
        f"{share / (whole or 1):.1%} of their time, {share:.1%} of the trace's"
    )
    missing = [problem for problem, is_tuned in tuned if not is_tuned]
    for problem in missing[:MOST_MISSING]:
        shapes = describe_shapes(problem.signature)
        print_line(f"{problem.share:>7.2%} {problem.calls:>7,}  {problem.name} {shapes}", sys.stdout)
    if len(missing) > MOST_MISSING:
        print(f"and {len(missing) - MOST_MISSING:,} more without an entry")
    return 0
