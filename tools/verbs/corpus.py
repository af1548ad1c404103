"""`opgrip corpus`: what several traces say together."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from opgrip.tools.verbs.verb import Verb, verbs
from opgrip.traces.command import add_debug, add_reading, positive
from opgrip.traces.output import check_writable
from opgrip.traces.progress import Reporter

BY = ("op", "shape", "dtype", "model", "family", "signature", "row")
EXAMPLES = """\
examples:
  opgrip corpus zoo                                  operators by their share of time, and how many models call them
  opgrip corpus traces/ step.jsonl --by model
  opgrip corpus zoo:mmdet --by signature --models 2: signatures that are alike in two models or more
  opgrip corpus zoo dlop/ --top 100                  what real traces have beside an old benchmark's configurations
  opgrip corpus zoo --by row -o corpus.parquet       all signatures of all traces, for pandas
"""


def prepare(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument(
        "inputs", nargs="+", metavar="TRACE", help="files and folders of traces and of other tools, zoo, zoo:PATTERN"
    )
    parser.add_argument("--by", choices=BY, default=BY[0], help="what to have a row for (default: %(default)s)")
    parser.add_argument("--top", type=positive, default=30, metavar="N", help="rows to show (default: %(default)s)")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write all to a .json, .csv or .parquet")
    parser.add_argument("-f", "--force", action="store_true", help="replace an existing file")
    add_reading(parser, "take what there is of cut or damaged traces")
    add_debug(parser)


def run(args: argparse.Namespace) -> int:
    """Print the table."""
    from opgrip.traces.corpus import read_corpus, summarize
    from opgrip.traces.corpus.files import check_form, write_summary
    from opgrip.traces.corpus.table import print_summary

    if args.output is not None:
        check_form(args.output)
        check_writable(args.output, args.force)
    reporter = Reporter(args.prog)
    corpus = read_corpus(args.inputs, args.partial, args.unbounded, reporter.reading)
    for note in corpus.notes:
        reporter.say(note)
    summary = summarize(corpus, args.by)
    print_summary(corpus, summary, args.top, sys.stdout)
    if args.output is not None:
        write_summary(corpus, summary, args.output, args.force)
    return 0


verbs.register("corpus")(Verb("what several traces say together", EXAMPLES, prepare, run))
