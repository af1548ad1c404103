"""`opgrip results merge`: one file with the rows of several."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from opgrip.cli.command import add_debug
from opgrip.tools.verbs.results_list import add_store
from opgrip.tools.verbs.verb import Verb, verbs

EXAMPLES = """\
examples:
  opgrip results merge zoo-*-of-16.json -o zoo.json           shards of one replay, by --shard
  opgrip results merge part1.json part2.json -o all.json      parts of one replay, by --start and --stop
  opgrip results merge mon.parquet tue.parquet -o week.parquet   repeats of each case, which compare then has
"""

MOST_NAMED = 20
"""maximum number of missing shards to list"""


def prepare(parser: argparse.ArgumentParser) -> None:
    """Add the options of the verb."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="files of opreplay, or runs of the store")
    add_store(parser)
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="the file to write")
    parser.add_argument("-f", "--force", action="store_true", help="replace an existing file")
    add_debug(parser)


def run(args: argparse.Namespace) -> int:
    """Merge runs: equal cases of several runs become repeats, other cases are kept as they are."""
    from opgrip.cli.command import counted
    from opgrip.cli.output_files import check_writable
    from opgrip.replay.comparison.results_store import Store, merge_runs, missing_shards
    from opgrip.replay.outcome import read_run, write_results

    check_writable(args.output, args.force)
    store = Store(args.store)
    merged = merge_runs([read_run(store.find(name)) for name in args.runs])
    write_results(merged.rows, merged.header, args.output, args.force)
    print(f"{args.prog}: {counted(len(merged), 'row')} to {args.output}", file=sys.stderr)
    if missing := missing_shards(merged.header):
        which = ", ".join(map(str, missing[:MOST_NAMED])) + (" and more" if len(missing) > MOST_NAMED else "")
        print(f"{args.prog}: {counted(len(missing), 'shard')} missing: {which}", file=sys.stderr)
    return 0


verbs.register("results merge")(Verb("one file of the rows of several", EXAMPLES, prepare, run))
