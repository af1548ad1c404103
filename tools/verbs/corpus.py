"""`opgrip corpus` and `opgrip corpus distill`: a summary of many traces, and a short trace that represents them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from opgrip.cli.command import add_reading, counted, positive, printable
from opgrip.cli.output_files import check_writable
from opgrip.cli.progress import Reporter
from opgrip.errors import UserError, shortened
from opgrip.tools.verbs import add_output, add_top, report_output, verb

if TYPE_CHECKING:
    from opgrip.zoo.corpus import Corpus
    from opgrip.zoo.scoring.baselines import Times

MOST_NOTES, MOST_NOTE = 10, 200


def say_notes(notes: Sequence[str], reporter: Reporter, more: str = "") -> None:
    for note in notes[:MOST_NOTES]:
        reporter.say(shortened(printable(note), MOST_NOTE))
    if len(notes) > MOST_NOTES:
        reporter.say(f"{len(notes) - MOST_NOTES:,} more files were left out{more}")


BY = ("op", "shape", "dtype", "model", "family", "signature", "row")
ALL = -1
TRACES_HELP = (
    "trace, file of another tool, folder of traces, zoo (the traces of real models that ship), or zoo:PATTERN for some "
    "of them"
)
EXAMPLES = """\
examples:
  opgrip corpus zoo                                     operators by share of time, and how many models call each
  opgrip corpus runs/ step.jsonl --by model             the traces of a folder, and one more
  opgrip corpus zoo:mmdet --by signature --models 2:    signatures that two or more models share
  opgrip corpus zoo --by op --models all                operators that every model calls
  opgrip corpus zoo --coverage                          which of torch's public operators the traces contain
  opgrip corpus zoo --by row -o corpus.parquet          all signatures of all traces, for pandas
"""


def prepare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("inputs", nargs="+", metavar="TRACE", help=TRACES_HELP)
    parser.add_argument(
        "--by",
        choices=BY,
        default=BY[0],
        help="what each row of the table describes; row means a signature in one trace (default: %(default)s)",
    )
    parser.add_argument(
        "--models",
        type=span,
        metavar="N|A:B|all",
        help="show only rows that occur in this number of models: 1, 2: (two or more), 3:10, or all",
    )
    parser.add_argument(
        "--coverage", action="store_true", help="show which of torch's public operators the traces contain"
    )
    add_top(parser, 30)
    add_output(parser, "write all rows to this file: .json, .csv, .md or .parquet")
    add_reading(parser)


@verb("corpus", "summarize many traces in one table", EXAMPLES, prepare)
def run(args: argparse.Namespace) -> int:
    from opgrip.zoo.corpus import read_corpus
    from opgrip.zoo.corpus.summaries import check_form

    if args.models and args.by in ("model", "row"):
        raise UserError(f"--models cannot be used with --by {args.by}", "a row belongs to one model only")
    if args.output is not None:
        check_form(args.output)
        check_writable(args.output, args.force)
    reporter = Reporter(args.prog)
    corpus = read_corpus(args.inputs, args.partial, args.unbounded, reporter.reading)
    say_notes(corpus.notes, reporter, "; -o FILE.json lists them")
    (_cover if args.coverage else _summarize)(corpus, args)
    return 0


def _summarize(corpus: Corpus, args: argparse.Namespace) -> None:
    from opgrip.zoo.corpus import summarize
    from opgrip.zoo.corpus.summaries import print_summary, write_summary

    summary = summarize(corpus, args.by)
    if args.models:
        summary = summary.of_models(*args.models)
    print_summary(corpus, summary, args.top, sys.stdout)
    if args.output is not None:
        write_summary(corpus, summary, args.output, args.force)
        report_output(args, counted(len(summary.table), "row"))


def _cover(corpus: Corpus, args: argparse.Namespace) -> None:
    from opgrip.zoo.corpus.summaries import cover, facts_of, print_coverage, write_table

    table = cover(corpus)
    print_coverage(table, sys.stdout)
    if args.output is not None:
        write_table(table, args.output, args.force, facts_of(corpus))
        report_output(args, counted(len(table), "row"))


def span(text: str) -> tuple[int, int | None]:
    """Return the smallest and largest number of models from a text such as `2:5`; `all` gives (`ALL`, None)."""
    if text == "all":
        return ALL, None
    first, colon, last = text.partition(":")
    numbers = [number for number in (first, last) if number]
    if not numbers or not all(number.isdecimal() and len(number) < 10 for number in numbers):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number ('2'), a range ('2:') or 'all'")
    least, most = int(first or 1), int(last) if last else (None if colon else int(first))
    if most is not None and not 1 <= max(least, 1) <= most:
        raise argparse.ArgumentTypeError(f"{text!r} does not contain a possible number of models")
    return least, most


CASES = 500
BASELINE = "baseline"  # name that means the shipped baseline, used in place of a run
DISTILL_EXAMPLES = """\
examples:
  opgrip corpus distill zoo --cases 500 -o bench.jsonl.zst
  opreplay bench.jsonl.zst                                       a score for all models: 28 minutes on two slow cores
  opgrip corpus distill zoo --times baseline -o bench.jsonl.zst  to predict the times of the shipped baseline
  opgrip corpus distill zoo --times one.parquet --check two.parquet -o bench.jsonl.zst

Each chosen case gets a weight, so that together they predict the time of each trace. --times names a replay of the
traces whose times to predict. --check names another replay, and prints its times for each model and trace next to the
predicted ones.
"""


def prepare_distill(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("inputs", nargs="+", metavar="TRACE", help=TRACES_HELP)
    parser.add_argument(
        "--cases", type=positive, default=CASES, metavar="N", help="number of cases to choose (default: %(default)s)"
    )
    add_output(parser, "trace file to write", required=True)
    parser.add_argument(
        "--times",
        action="append",
        metavar="RUN",
        help="choose cases that predict the times of a replay, instead of the captured times: a results file, a stored "
        "run, or the word baseline for the one that ships; can be repeated if several files have parts of the results",
    )
    parser.add_argument(
        "--check",
        action="append",
        metavar="RUN",
        help="print how well the chosen cases predict the times of another replay of these traces, given as for "
        "--times; can be repeated",
    )
    add_reading(parser)


@verb("corpus distill", "write a small trace that represents many models", DISTILL_EXAMPLES, prepare_distill)
def run_distill(args: argparse.Namespace) -> int:
    from opgrip.traces.zoo.manifest import FIELD
    from opgrip.zoo.corpus import read_corpus
    from opgrip.zoo.corpus.distill import (
        IN_PROGRAM,
        check_of,
        describe,
        distill,
        named_by_files,
        print_check,
        with_times,
        write_cases,
    )

    check_writable(args.output, args.force)
    reporter = Reporter(args.prog)
    base, times = _read_times(args.times or [])
    _, check = _read_times(args.check or [], chosen_by=times)
    corpus = read_corpus(args.inputs, args.partial, args.unbounded, reporter.reading)
    say_notes(corpus.notes, reporter)
    corpus = named_by_files(corpus)
    if args.times:
        corpus = with_times(corpus, times)
    distilled = distill(corpus, args.cases)
    fields = {FIELD: distilled.field(corpus, base)}
    write_cases(corpus, distilled.keys, args.output, args.force, args.unbounded, reporter.reading, fields, IN_PROGRAM)
    print(f"{describe(distilled)}: {args.output}")
    if args.check:
        print_check(check_of(corpus, distilled, check), sys.stdout)
    return 0


def _read_times(names: Sequence[str], chosen_by: Times | None = None) -> tuple[str, Times]:
    from opgrip.tools.verbs.results import read_runs
    from opgrip.zoo.scoring.baselines import is_replay_of, machine_of, read_baselines, times_of, times_of_baseline

    machine, times = "", dict[tuple[str, str], float]()
    for name in names:
        if name == BASELINE:
            baseline = read_baselines()
            own_machine, own = baseline.machine, times_of_baseline(baseline)
        else:
            (results,) = read_runs(None, name)
            own_machine, own = machine_of(results), times_of(results)
        if machine not in ("", own_machine):
            problem = f"{name} was measured on {own_machine}, the previous results on {machine}"
            raise UserError(printable(problem), "use results of one machine")
        if chosen_by and is_replay_of(own, chosen_by):
            problem = f"--check {name} has the same times as --times"
            raise UserError(printable(problem), "replay the traces again and use those results")
        machine = own_machine
        times |= own
    return machine, times
