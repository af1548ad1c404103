"""`opgrip compare`: which cases became faster or slower, and how sure that is."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from opgrip.tools.verbs.kept_runs import add_store
from opgrip.tools.verbs.verb import Verb, verbs
from opgrip.traces.command import add_debug, printable
from opgrip.traces.option_types import percent

EXAMPLES = """\
examples:
  opgrip compare main.json branch.json
  opgrip compare main.json branch.json --gate 'slower<=5%' --gate 'failed<=0' -o comparison.md
  opgrip compare latest~1 latest --by family          the two newest runs of the store
  opgrip compare a100.json h100.json l4.json --by op  several against the first

A verdict needs to know how much one replay differs from the next: replay with --repeats 5.
exit status: 1 where a gate is broken
"""


def prepare(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument(
        "base", metavar="BASE", help="what the others are held against: a file of opreplay, or a run of the store"
    )
    parser.add_argument("new", nargs="+", metavar="NEW", help="what is held against it")
    add_store(parser)
    parser.add_argument("--gate", action="append", default=[], metavar="CONDITION", help=GATE_HELP)
    parser.add_argument(
        "--same", type=percent, metavar="PERCENT", help="difference up to which times are the same (default: 5%%)"
    )
    parser.add_argument("--by", choices=("op", "module", "family", "mode"), help="also group cases by this")
    parser.add_argument("--all", action="store_true", help="show rows that are the same, or not decided, too")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="write all to a .json, .csv, .md or .xml (JUnit)"
    )
    parser.add_argument("-f", "--force", action="store_true", help="replace an existing file")
    add_debug(parser)


GATE_HELP = "exit with status 1 unless this holds: slower<=5%%, failed<=0, changed<=0, missing<=0; can be repeated"


def run(args: argparse.Namespace) -> int:
    """Compare, and hold the gates."""
    from opgrip.replay.comparing import compare
    from opgrip.replay.comparing.comparison import MARGIN
    from opgrip.replay.comparing.gate import NOTHING, parse_gate
    from opgrip.replay.comparing.reports.files import form_for, write_comparisons
    from opgrip.replay.comparing.reports.table import print_comparison
    from opgrip.replay.outcome import read_run
    from opgrip.replay.store.store import Store
    from opgrip.traces.output import check_writable

    gates = list(map(parse_gate, args.gate))
    if args.output is not None:
        form_for(args.output)
        check_writable(args.output, args.force)
    store = Store(args.store)
    base, *others = (read_run(store.find(name)) for name in (args.base, *args.new))
    limits = [item.most for item in gates if item.name == "slower"]
    margin = args.same if args.same is not None else min([MARGIN, *limits])
    comparisons = [compare(base, new, margin) for new in others]
    for comparison in comparisons:
        print_comparison(comparison, sys.stdout, args.by, args.all)
    if args.output is not None:
        write_comparisons(comparisons, gates, args.output, args.force)
    is_broken = False
    for item in gates:
        for comparison in comparisons:
            problems = item.problems(comparison)
            is_broken |= bool(problems)
            for problem in problems:
                how = f"cannot be held: {problem}" if problem == NOTHING else f"is broken by {printable(problem)}"
                print(f"{args.prog}: {item.text} {how}", file=sys.stderr)
    return int(is_broken)


verbs.register("compare")(Verb("which cases became faster or slower, and how sure that is", EXAMPLES, prepare, run))
