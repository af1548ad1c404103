"""`opgrip trace convert`: converts between traces and files of other tools."""

from __future__ import annotations

import argparse
import sys
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
)
from opgrip.errors import UserError
from opgrip.tools.verbs import add_capture, verb

if TYPE_CHECKING:
    from opgrip.traces.io.foreign_files import Losses
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
    parser.add_argument("--report", type=Path, metavar="FILE", help="JSON file to write, with what each call lost")
    parser.add_argument("-f", "--force", action="store_true", help="replace an existing file")
    add_reading(parser)


@verb("trace convert", "convert between traces and files of other tools", CONVERT_EXAMPLES, prepare_convert)
def run_convert(args: argparse.Namespace) -> int:
    from opgrip.traces.io.reader import TraceReader

    target = _format_named(args.to) if args.to else _format_of_name(args.output)
    _check_target(target)
    if not _is_folder(target):
        check_writable(args.output, args.force)
    check_output(args.report, args.force)
    cut = from_arguments(Cut, args)
    source = _format_named(args.source) if args.source else OWN
    reader = TraceReader(args.input, args.unbounded, source if source != OWN else None, cut, args.capture)
    losses = _write_own(reader, args) if target == OWN else _write_foreign(reader, target, args)
    if args.report is not None:
        write_json(losses.as_json(), args.report, args.force)
    _print_losses(args, losses)
    return 0


def _write_own(reader: TraceReader, args: argparse.Namespace) -> Losses:
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
    return reader.losses


def _write_foreign(reader: TraceReader, target: str, args: argparse.Namespace) -> Losses:
    from opgrip.traces import load
    from opgrip.traces.io.foreign_files import formats

    format_ = formats.get(target)
    assert format_ is not None, "it was checked"
    trace = load(args.input, args.partial, args.unbounded, reader)
    if format_.write_folder is not None:
        with whole_folder(args.output) as folder:
            format_.write_folder(trace, folder, reader.losses)
        return reader.losses
    assert format_.write is not None
    with whole_file(args.output, args.force) as raw:
        packed = args.output.suffix in (".gz", ".zst")
        sink = compress_to(raw, args.output.name) if packed else raw
        format_.write(trace, sink, reader.losses)  # type: ignore[arg-type]
        if packed:
            sink.close()
    return reader.losses


def _check_target(target: str) -> None:
    names = _written()
    if target not in names:
        choice = f"choose one of {', '.join(names)}"
        raise UserError(f"{target} is not a writable format", did_you_mean(target, names, choice))


def _written() -> list[str]:
    from opgrip.traces.io.foreign_files import formats

    return [OWN, *(name for name, format_ in formats.items() if format_.is_written)]


def _format_named(word: str) -> str:
    from opgrip.traces.io.foreign_files import formats

    name = word.lower().replace("-", "_")
    return name if name == OWN or formats.get(name) else word


def _is_folder(target: str) -> bool:
    from opgrip.traces.io.foreign_files import formats

    format_ = formats.get(target)
    return format_ is not None and format_.write_folder is not None


def _format_of_name(path: Path) -> str:
    from opgrip.traces.io.foreign_files import PACKED, formats

    if path.name.endswith(OWN_SUFFIXES):
        return OWN
    name = path.stem if path.suffix in PACKED else path.name
    matches = [(len(suffix), key) for key, item in formats.items() for suffix in item.suffixes if name.endswith(suffix)]
    if matches:
        return max(matches)[1]
    if path.is_dir():
        raise UserError(f"{path} is a folder", "write a file, or a new folder with --to flashinfer")
    names = ", ".join(_written())
    if (suffix := path.suffix.removeprefix(".")) in set(formats.names()) - set(_written()):
        raise UserError(f"{path} cannot be written: .{suffix} files can only be read", f"choose one of {names}")
    raise UserError(
        f"{path} has an unknown suffix", f"name a .jsonl file to write a trace, or give the format with --to ({names})"
    )


class _ListFormats(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from opgrip.display.tables import TableColumn, print_table
        from opgrip.traces.io.foreign_files import formats

        rows = [(OWN, "read, written", ", ".join(OWN_SUFFIXES), "traces of opcapture")]
        for name, item in formats.items():
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
