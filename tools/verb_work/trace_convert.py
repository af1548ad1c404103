"""`opgrip trace convert`, `export-case` and `tuner`: write files for other tools, and scripts."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from opgrip.cli.command import counted, did_you_mean, printable
from opgrip.cli.option_types import Cut
from opgrip.cli.options import from_arguments
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
from opgrip.replay.results.results import describe_shapes
from opgrip.tools.exports.exported_cases import export_case, export_sample, export_unit
from opgrip.tools.verbs import report_output
from opgrip.tools.verbs.trace_options import CALL, OWN, OWN_SUFFIXES
from opgrip.traces import load
from opgrip.traces.formats.tuners import TUNERS, Problem, Tuner, lists_of, problems_of, read_tuned, tuned_of
from opgrip.traces.io.foreign_files import Format, Losses, formats
from opgrip.traces.io.reader import TraceReader
from opgrip.traces.io.sample_folder import SAMPLE, read_sample
from opgrip.traces.io.writer import TraceWriter
from opgrip.traces.schema.records import Header


def run_convert(args: argparse.Namespace) -> int:
    target = _format_named(args.to) if args.to else _format_of_name(args.output)
    names = _written()
    if target not in names:
        choice = f"choose one of {', '.join(names)}"
        raise UserError(f"{target} is not a writable format", did_you_mean(target, names, choice))
    format_ = formats.get(target)
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


def _write_own(reader: TraceReader, args: argparse.Namespace) -> None:
    records = iter(reader)
    header = next(records)
    assert isinstance(header, Header)
    with TraceWriter(args.output, header, args.force) as writer:
        for record in records:
            writer.write(record)
        if reader.missing and not args.partial:
            raise UserError(reader.missing, "convert it with --partial")


def _write_foreign(reader: TraceReader, format_: Format, args: argparse.Namespace) -> None:
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
    return [OWN, *(name for name, format_ in formats.items() if format_.is_written)]


def _format_named(word: str) -> str:
    name = word.lower().replace("-", "_")
    return name if name == OWN or formats.get(name) else word


def _format_of_name(path: Path) -> str:
    if path.name.endswith(OWN_SUFFIXES):
        return OWN
    name = path.stem if path.suffix in (".gz", ".zst") else path.name
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


def run_export(args: argparse.Namespace) -> int:
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


MOST_MISSING = 10


def run_tuner(args: argparse.Namespace) -> int:
    check_output(args.output, args.force)
    if args.output is not None and args.tuned is not None:
        raise UserError("--tuned writes no file", "leave -o out")

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
