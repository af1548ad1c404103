"""`opgrip compare`: the cases that became faster or slower, with confidence intervals."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from opgrip.cli.option_types import percent
from opgrip.tools.verbs.results import add_store
from opgrip.tools.verbs.verb import Verb, verbs

EXAMPLES = """\
examples:
  opgrip compare main.json branch.json
  opgrip compare main.json branch.json --gate 'slower<=5%' --gate 'failed<=0' -o comparison.md
  opgrip compare main.json branch.json --gate 'total<=2%' --gate 'op<=10%'
  opgrip compare latest~1 latest --by family          the two newest runs of the store
  opgrip compare a100.json h100.json l4.json --by op  several against the first

A verdict needs the variation between replays: replay with --repeats 5.
exit status: 0 if all gates passed, 1 if one failed, 2 for a usage error, 3 if one is undecided and none failed
gates: slower (each row), total, op, module, family, mode (each group) <=PERCENT; failed, changed, missing <=ROWS
"""


def prepare(parser: argparse.ArgumentParser) -> None:
    """Add the options of the verb."""
    parser.add_argument(
        "base",
        metavar="BASE",
        help="baseline: a results file, or a run of the store",
    )
    parser.add_argument("new", nargs="+", metavar="NEW", help="files to compare with the baseline")
    add_store(parser)
    parser.add_argument("--gate", action="append", default=[], metavar="CONDITION", help=GATE_HELP)
    parser.add_argument(
        "--same",
        type=percent,
        metavar="PERCENT",
        help="largest relative difference of equal times (default: 5%%)",
    )
    parser.add_argument(
        "--by", choices=("op", "module", "family", "mode"), help="also print a table of groups of cases"
    )
    parser.add_argument("--all", action="store_true", help="also show unchanged and undecided rows")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="write all to a .json, .csv, .md or .xml (JUnit)"
    )
    parser.add_argument("-f", "--force", action="store_true", help="replace an existing file")


GATE_HELP = (
    "condition; exit with status 1 if it fails, 3 if it is undecided: slower<=5%% for each row, total<=5%%, op<=5%% "
    "(or module, family, mode) for each group, failed<=0, changed<=0, missing<=0; can be repeated"
)


def run(args: argparse.Namespace) -> int:
    """Compare runs, print the comparisons, and check the gates."""
    from opgrip.cli.output_files import check_writable
    from opgrip.replay.comparison import compare
    from opgrip.replay.comparison.comparison_files import form_for, write_comparisons
    from opgrip.replay.comparison.comparison_report import print_comparison
    from opgrip.replay.comparison.gate import exit_status, hold_all, margin_for, parse_gate
    from opgrip.replay.comparison.results_store import Store
    from opgrip.replay.outcome import read_run

    gates = list(map(parse_gate, args.gate))
    if args.output is not None:
        form_for(args.output)
        check_writable(args.output, args.force)
    store = Store(args.store)
    base, *others = (read_run(store.find(name)) for name in (args.base, *args.new))
    margin = args.same if args.same is not None else margin_for(gates)
    comparisons = [compare(base, new, margin) for new in others]
    held = [hold_all(gates, comparison) for comparison in comparisons]
    for comparison, outcomes in zip(comparisons, held, strict=True):
        print_comparison(comparison, sys.stdout, args.by, args.all, outcomes)
    if args.output is not None:
        write_comparisons(comparisons, gates, args.output, args.force)
    return exit_status([item for outcomes in held for item in outcomes])


verbs.register("compare")(Verb("compare results and report faster and slower cases", EXAMPLES, prepare, run))
