"""`opgrip corpus`: tables over several traces."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from opgrip.cli.command import add_debug, add_reading, positive, printable
from opgrip.cli.output_files import check_writable
from opgrip.cli.progress import Reporter
from opgrip.errors import UserError, shortened
from opgrip.tools.verbs.verb import Verb, verbs

if TYPE_CHECKING:
    from opgrip.zoo.corpus import Corpus


MOST_NOTES, MOST_NOTE = 10, 200


def say_notes(notes: Sequence[str], reporter: Reporter, more: str = "") -> None:
    """Report the first notes.

    Parameters
    ----------
    more : text after the number of further notes, such as where to find them
    """
    for note in notes[:MOST_NOTES]:
        reporter.say(shortened(printable(note), MOST_NOTE))
    if len(notes) > MOST_NOTES:
        reporter.say(f"{len(notes) - MOST_NOTES:,} more files were left out{more}")


BY = ("op", "shape", "dtype", "model", "family", "signature", "row")
ALL = -1
EXAMPLES = """\
examples:
  opgrip corpus zoo                                  operators by their share of time, and how many models call them
  opgrip corpus runs/ step.jsonl --by model            those of a folder, and one more
  opgrip corpus zoo:mmdet --by signature --models 2: signatures that are alike in two models or more
  opgrip corpus zoo --by op --models all             operators that every model calls
  opgrip corpus zoo --coverage                       report which of torch's public operators the traces contain
  opgrip corpus zoo --by row -o corpus.parquet       all signatures of all traces, for pandas
"""


def prepare(parser: argparse.ArgumentParser) -> None:
    """Add the options of the verb."""
    parser.add_argument(
        "inputs", nargs="+", metavar="TRACE", help="files and folders of traces and of other tools, zoo, zoo:PATTERN"
    )
    parser.add_argument(
        "--by", choices=BY, default=BY[0], help="what each row of the table stands for (default: %(default)s)"
    )
    parser.add_argument(
        "--models",
        type=span,
        metavar="N|A:B|all",
        help="only rows that this number of models have: 1, 2:, 3:10, or all",
    )
    parser.add_argument(
        "--coverage", action="store_true", help="report which of torch's public operators the traces contain"
    )
    parser.add_argument("--top", type=positive, default=30, metavar="N", help="rows to show (default: %(default)s)")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write all to a .json, .csv, .md or .parquet")
    parser.add_argument("-f", "--force", action="store_true", help="replace an existing file")
    add_reading(parser, "take what there is of cut or damaged traces")
    add_debug(parser)


def run(args: argparse.Namespace) -> int:
    """Print the table."""
    from opgrip.zoo.corpus import read_corpus
    from opgrip.zoo.corpus.corpus_table import check_form

    _check(args)
    if args.output is not None:
        check_form(args.output)
        check_writable(args.output, args.force)
    reporter = Reporter(args.prog)
    corpus = read_corpus(args.inputs, args.partial, args.unbounded, reporter.reading)
    say_notes(corpus.notes, reporter, "; -o FILE.json names them")
    if args.coverage:
        _cover(corpus, args)
    else:
        _summarize(corpus, args)
    return 0


def _check(args: argparse.Namespace) -> None:
    if args.models and args.by in ("model", "row"):
        raise UserError(f"--models does not go with --by {args.by}", "each of its rows is of one model")


def _summarize(corpus: Corpus, args: argparse.Namespace) -> None:
    from opgrip.zoo.corpus import summarize
    from opgrip.zoo.corpus.corpus_table import print_summary, write_summary

    summary = summarize(corpus, args.by)
    if args.models:
        summary = summary.of_models(*args.models)
    print_summary(corpus, summary, args.top, sys.stdout)
    if args.output is not None:
        write_summary(corpus, summary, args.output, args.force)


def _cover(corpus: Corpus, args: argparse.Namespace) -> None:
    from opgrip.zoo.corpus.summaries import cover, print_coverage

    table = cover(corpus)
    print_coverage(table, sys.stdout)
    _write(table, corpus, args)


def _write(table: object, corpus: Corpus, args: argparse.Namespace) -> None:
    from opgrip.zoo.corpus.corpus_table import facts_of, write_table

    if args.output is not None:
        write_table(table, args.output, args.force, facts_of(corpus))  # type: ignore[arg-type]


def span(text: str) -> tuple[int, int | None]:
    """Parse a range of numbers of models: `2`, `2:`, `:3`, `2:5`, or `all`."""
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
