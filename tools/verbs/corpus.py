"""`opgrip corpus`: what several traces say together."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from opgrip.cli.command import add_debug, add_reading, positive
from opgrip.cli.option_types import names
from opgrip.cli.output_files import check_writable
from opgrip.cli.progress import Reporter
from opgrip.errors import UserError
from opgrip.tools.verbs.corpus_notes import say_notes
from opgrip.tools.verbs.verb import Verb, verbs

if TYPE_CHECKING:
    from opgrip.traces.corpus import Corpus

BY = ("op", "shape", "dtype", "model", "family", "signature", "row")
ALL = -1
EXAMPLES = """\
examples:
  opgrip corpus zoo                                  operators by their share of time, and how many models call them
  opgrip corpus runs/ step.jsonl --by model            those of a folder, and one more
  opgrip corpus zoo:mmdet --by signature --models 2: signatures that are alike in two models or more
  opgrip corpus zoo --by op --models all             operators that every model calls
  opgrip corpus zoo dlop/ --compare-sources          what real traces have that another benchmark lacks, and vice versa
  opgrip corpus zoo --coverage                       which of torch's public operators are in it
  opgrip corpus zoo --mode onnxruntime --top 200     what of the 200 signatures with most time a mode cannot run
  opgrip corpus zoo --by row -o corpus.parquet       all signatures of all traces, for pandas
"""


def prepare(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument(
        "inputs", nargs="+", metavar="TRACE", help="files and folders of traces and of other tools, zoo, zoo:PATTERN"
    )
    parser.add_argument("--by", choices=BY, default=BY[0], help="what to have a row for (default: %(default)s)")
    parser.add_argument(
        "--models", type=span, metavar="N|A:B|all", help="only what so many models have: 1, 2:, 3:10, or all of them"
    )
    others = parser.add_mutually_exclusive_group()
    others.add_argument("--compare-sources", action="store_true", help="operators that traces have and others lack")
    others.add_argument("--coverage", action="store_true", help="which of torch's public operators are in it")
    others.add_argument(
        "--mode", type=names, default=(), metavar="NAME,...", help="find what modes cannot run, by trying"
    )
    parser.add_argument("--device", metavar="NAME", help="find what a device cannot run, or a mode there, by trying")
    parser.add_argument("--resume", action="store_true", help="go on with a trial that was interrupted; needs --output")
    parser.add_argument(
        "--top", type=positive, metavar="N", help="rows to show (default: 30); signatures to try (default: all)"
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write all to a .json, .csv, .md or .parquet")
    parser.add_argument("-f", "--force", action="store_true", help="replace an existing file")
    add_reading(parser, "take what there is of cut or damaged traces")
    add_debug(parser)


def run(args: argparse.Namespace) -> int:
    """Print the table."""
    from opgrip.traces.corpus import read_corpus
    from opgrip.traces.corpus.files import check_form

    _check(args)
    if args.output is not None:
        check_form(args.output)
        check_writable(args.output, args.force)
    reporter = Reporter(args.prog)
    corpus = read_corpus(args.inputs, args.partial, args.unbounded, reporter.reading)
    say_notes(corpus.notes, reporter, "; -o FILE.json names them")
    if args.compare_sources:
        _compare(corpus, args)
    elif args.coverage:
        _cover(corpus, args)
    elif args.mode or args.device:
        _try(corpus, args, reporter)
    else:
        _summarize(corpus, args)
    return 0


def _check(args: argparse.Namespace) -> None:
    if args.resume and args.output is None:
        raise UserError("--resume needs to know what it goes on with", "name the file with --output")
    if args.resume and not (args.mode or args.device):
        raise UserError("--resume goes on with a trial", "add the --mode or --device that was tried")
    if args.models and args.by in ("model", "row"):
        raise UserError(f"--models does not go with --by {args.by}", "each of its rows is of one model")


def _summarize(corpus: Corpus, args: argparse.Namespace) -> None:
    from opgrip.traces.corpus import summarize
    from opgrip.traces.corpus.files import write_summary
    from opgrip.traces.corpus.table import print_summary

    summary = summarize(corpus, args.by)
    if args.models:
        summary = summary.of_models(*args.models)
    print_summary(corpus, summary, args.top or 30, sys.stdout)
    if args.output is not None:
        write_summary(corpus, summary, args.output, args.force)


def _compare(corpus: Corpus, args: argparse.Namespace) -> None:
    from opgrip.tools.corpus.sources import compare_sources
    from opgrip.tools.corpus.tables import print_sources

    if len(corpus.sources) < 2:
        raise UserError(f"all these files are of one source, {corpus.sources[0]}", "name files of another tool too")
    table = compare_sources(corpus, args.unbounded)
    print_sources(corpus, table, args.top or 30, sys.stdout)
    _write(table, corpus, args)


def _cover(corpus: Corpus, args: argparse.Namespace) -> None:
    from opgrip.tools.corpus.coverage import cover
    from opgrip.tools.corpus.tables import print_coverage

    table = cover(corpus)
    print_coverage(table, sys.stdout)
    _write(table, corpus, args)


def _try(corpus: Corpus, args: argparse.Namespace, reporter: Reporter) -> None:
    from opgrip.replay.modes import find_mode
    from opgrip.tools.corpus.lacking import Trial, find_lacking, kept_files
    from opgrip.tools.corpus.tables import print_lacking

    for name in args.mode:
        find_mode(name)
    trial = Trial(args.mode, args.device or "cpu", args.top, args.output, args.resume)
    if args.output is not None and not args.resume:
        for path in kept_files(args.output):
            check_writable(path, args.force)
    try:
        table = find_lacking(corpus, trial, reporter, args.unbounded)
    except KeyboardInterrupt:
        reporter.say("go on with --resume" if args.output else "with --output it could go on")
        raise
    print_lacking(table, args.top or 30, sys.stdout)
    _write(table, corpus, args)


def _write(table: object, corpus: Corpus, args: argparse.Namespace) -> None:
    from opgrip.traces.corpus.files import facts_of, write_table

    if args.output is not None:
        write_table(table, args.output, args.force, facts_of(corpus))  # type: ignore[arg-type]


def span(text: str) -> tuple[int, int | None]:
    """How many models: `2`, `2:`, `:3`, `2:5`, or all of a source."""
    if text == "all":
        return ALL, None
    first, colon, last = text.partition(":")
    numbers = [number for number in (first, last) if number]
    if not numbers or not all(number.isdecimal() and len(number) < 10 for number in numbers):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number, as 2, nor a span of them, as 2:, nor all")
    least, most = int(first or 1), int(last) if last else (None if colon else int(first))
    if most is not None and not 1 <= max(least, 1) <= most:
        raise argparse.ArgumentTypeError(f"{text!r}: no row is of so many models")
    return least, most


verbs.register("corpus")(Verb("what several traces say together", EXAMPLES, prepare, run))
