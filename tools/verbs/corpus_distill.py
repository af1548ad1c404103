"""`opgrip corpus distill`: a trace of the few cases that represent many models."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from opgrip.cli.command import add_debug, add_reading, positive, printable
from opgrip.cli.output_files import check_writable
from opgrip.cli.progress import Reporter
from opgrip.errors import UserError
from opgrip.tools.verbs.corpus import say_notes
from opgrip.tools.verbs.verb import Verb, verbs

if TYPE_CHECKING:
    from opgrip.zoo.scoring.case_times import Times

CASES = 500
BASELINE = "baseline"
"""name that means the shipped baseline, used in place of a run"""
EXAMPLES = """\
examples:
  opgrip corpus distill zoo --cases 500 -o bench.jsonl.zst
  opreplay bench.jsonl.zst                                       a score of all models: 28 minutes on two slow cores
  opgrip corpus distill zoo --times baseline -o bench.jsonl.zst  beside the machine that opreplay zoo scores by
  opgrip corpus distill zoo --times one.parquet --check two.parquet -o bench.jsonl.zst

--times takes results of a replay of these traces, whose times the weights then refer to; --check takes those of
another, and prints what the distilled cases predict of each model and trace beside what these took.
"""


def prepare(parser: argparse.ArgumentParser) -> None:
    """Add the options of the verb."""
    parser.add_argument("inputs", nargs="+", metavar="TRACE", help="files and folders of traces, zoo, zoo:PATTERN")
    parser.add_argument(
        "--cases", type=positive, default=CASES, metavar="N", help="number of cases to choose (default: %(default)s)"
    )
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="the trace to write")
    parser.add_argument("-f", "--force", action="store_true", help="replace an existing file")
    parser.add_argument(
        "--times",
        action="append",
        metavar="RUN",
        help="results of opreplay of these traces, or baseline for those of the zoo that ship (default: captured "
        "times); can be repeated for a replay in pieces",
    )
    parser.add_argument(
        "--check",
        action="append",
        metavar="RUN",
        help="results of another replay than --times, or baseline, to compare the prediction with; can be repeated",
    )
    add_reading(parser, "take what there is of cut or damaged traces")
    add_debug(parser)


def run(args: argparse.Namespace) -> int:
    """Choose cases, write their trace, and check predictions against another replay."""
    from opgrip.traces.zoo.manifest import FIELD
    from opgrip.zoo.corpus import read_corpus
    from opgrip.zoo.corpus.cases import IN_PROGRAM, write_cases
    from opgrip.zoo.corpus.distill import check_of, describe, distill, named_by_files, print_check, with_times

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
    """Return a description of the machine, and the times of several results; later results replace earlier ones.

    Parameters
    ----------
    chosen_by : times to reject, because the cases were chosen by them and predict them by construction
    """
    from opgrip.replay.comparison.results_store import Store
    from opgrip.replay.outcome import read_run
    from opgrip.zoo.scoring.baselines import read_baselines
    from opgrip.zoo.scoring.case_times import is_replay_of, machine_of, times_of, times_of_baseline

    machine, times = "", dict[tuple[str, str], float]()
    for name in names:
        if name == BASELINE:
            baseline = read_baselines()
            own_machine, own = baseline.machine, times_of_baseline(baseline)
        else:
            results = read_run(Store().find(name))
            own_machine, own = machine_of(results), times_of(results)
        if machine not in ("", own_machine):
            problem = f"{name} is of {own_machine}, the times before it of {machine}"
            raise UserError(printable(problem), "name results of one machine")
        if chosen_by and is_replay_of(own, chosen_by):
            problem = f"--check {name} has the very times that the cases are chosen by, which says nothing"
            raise UserError(printable(problem), "replay the traces once more and check with those results")
        machine = own_machine
        times |= own
    return machine, times


verbs.register("corpus distill")(Verb("the few cases that stand for many models, as a trace", EXAMPLES, prepare, run))
