"""`opgrip corpus distill`: the few cases that stand for many models, as a trace."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from opgrip.tools.verbs.corpus_notes import say_notes
from opgrip.tools.verbs.verb import Verb, verbs
from opgrip.traces.command import add_debug, add_reading, positive, printable
from opgrip.traces.errors import UserError
from opgrip.traces.output import check_writable
from opgrip.traces.progress import Reporter

CASES = 500
BASELINE = "baseline"
"""The name of the times that ship, where a run can be."""
EXAMPLES = """\
examples:
  opgrip corpus distill zoo --cases 500 -o bench.jsonl.zst
  opreplay bench.jsonl.zst                                       a score of all models, in ten minutes
  opgrip corpus distill zoo --times baseline -o bench.jsonl.zst  beside the machine that opreplay zoo scores by
  opgrip corpus distill zoo --times one.parquet --check two.parquet -o bench.jsonl.zst

--times takes results of a replay of these traces, whose times the weights then refer to; --check takes those of
another, and prints what the distilled cases predict of each trace beside what it took.
"""


def prepare(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument("inputs", nargs="+", metavar="TRACE", help="files and folders of traces, zoo, zoo:PATTERN")
    parser.add_argument("--cases", type=positive, default=CASES, metavar="N", help="to choose (default: %(default)s)")
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
        help="results of another replay, or baseline, to hold the prediction against; can be repeated",
    )
    add_reading(parser, "take what there is of cut or damaged traces")
    add_debug(parser)


def run(args: argparse.Namespace) -> int:
    """Choose, write, and hold against another replay."""
    from opgrip.replay.outcome import read_run
    from opgrip.replay.scoring.baselines import read_baselines
    from opgrip.replay.scoring.distilled import Times, check_of, machine_of, print_check, times_of, times_of_baseline
    from opgrip.replay.store.store import Store
    from opgrip.traces.corpus import read_corpus
    from opgrip.traces.corpus.cases import IN_PROGRAM, write_cases
    from opgrip.traces.corpus.distill import FIELD, describe, distill, named_by_files, with_times

    check_writable(args.output, args.force)
    reporter = Reporter(args.prog)

    def read(names: list[str]) -> tuple[str, Times]:
        """Whose times they are, and these: of the last of several results, where they have the same case."""
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
            machine = own_machine
            times |= own
        return machine, times

    base, times = read(args.times or [])
    _, check = read(args.check or [])
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


verbs.register("corpus distill")(Verb("the few cases that stand for many models, as a trace", EXAMPLES, prepare, run))
