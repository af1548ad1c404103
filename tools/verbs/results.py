"""`opgrip results list`, `merge`, `prune`, `score`, `show` and `opgrip compare`: results that opreplay stored."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from opgrip.cli.command import counted, positive, printable
from opgrip.cli.option_types import percent
from opgrip.tools.verbs import add_output, report_output, verb

if TYPE_CHECKING:
    from opgrip.replay.reports.outcome import Results


def add_store(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--store",
        type=Path,
        metavar="DIR",
        help="folder of the results store (default: $OPGRIP_STORE)",
    )


def add_run(parser: argparse.ArgumentParser) -> None:
    names = "results file, run of the results store (or the start or end of its name), or latest for the newest run"
    parser.add_argument("which", metavar="RUN", help=names)
    add_store(parser)


def read_runs(store: Path | None, *names: str) -> list[Results]:
    from opgrip.replay.reports.comparison.results_store import Store
    from opgrip.replay.reports.outcome import Results

    return [Results.load(Store(store).find(name)) for name in names]


MOST_OF_NAME = 60  # maximum number of characters of a cell

LIST_EXAMPLES = """\
examples:
  opgrip results list
  opgrip results list --trace '*faster_rcnn*'
  opgrip results list --store /shared/results --json | jq '.[].name'
"""


def prepare_list(parser: argparse.ArgumentParser) -> None:
    add_store(parser)
    parser.add_argument("--trace", metavar="GLOB", help="list only runs of traces whose names match")
    parser.add_argument("--machine", metavar="GLOB", help="list only runs on machines whose names match")
    parser.add_argument("--json", action="store_true", help="print a JSON list with all facts about each run")


@verb("results list", "list the runs of the results store", LIST_EXAMPLES, prepare_list)
def run_list(args: argparse.Namespace) -> int:
    from opgrip.display.tables import TableColumn, print_table
    from opgrip.replay.reports.comparison.results_store import Store

    store = Store(args.store)
    rows = []
    for run in store.runs():
        about = run.summary()
        if fnmatchcase(about.trace, args.trace or "*") and fnmatchcase(about.machine, args.machine or "*"):
            rows.append((run, about))
    if args.json:
        json.dump([{"name": run.name, "path": str(run.path), **asdict(about)} for run, about in rows], sys.stdout)
        print()
        return 0
    if not rows:
        print(f"{args.prog}: {store.folder} contains no matching runs: opreplay --store adds one", file=sys.stderr)
        return 0
    columns = [
        TableColumn("run", lambda row: row[0].name, most=MOST_OF_NAME),
        TableColumn("machine", lambda row: row[1].machine, rank=4, most=MOST_OF_NAME),
        TableColumn("device", lambda row: row[1].device, rank=3, most=MOST_OF_NAME),
        TableColumn("trace", lambda row: row[1].trace, most=MOST_OF_NAME),
        TableColumn("modes", lambda row: ", ".join(row[1].modes), rank=2, most=MOST_OF_NAME),
        TableColumn("dtype", lambda row: ", ".join(row[1].dtypes), most=MOST_OF_NAME, when=lambda row: row[1].dtypes),
        TableColumn("torch", lambda row: row[1].torch, rank=5, most=MOST_OF_NAME),
        TableColumn("cases", lambda row: row[1].cases, ",d"),
        TableColumn("ok rows", lambda row: row[1].ok, ",d"),
    ]
    print_table(columns, rows, sys.stdout)
    return 0


PRUNE_EXAMPLES = """\
examples:
  opgrip results prune
  opgrip results prune --keep 10 --store /shared/results
"""


def prepare_prune(parser: argparse.ArgumentParser) -> None:
    add_store(parser)
    parser.add_argument(
        "--keep", type=positive, default=50, metavar="N", help="number of newest runs to keep (default: %(default)s)"
    )


@verb("results prune", "remove all but the newest runs of the results store", PRUNE_EXAMPLES, prepare_prune)
def run_prune(args: argparse.Namespace) -> int:
    from opgrip.replay.reports.comparison.results_store import Store

    store = Store(args.store)
    removed = counted(len(store.prune(args.keep)), "run")
    print(f"{args.prog}: removed {removed} from {store.folder}, {len(store.runs())} left", file=sys.stderr)
    return 0


MERGE_EXAMPLES = """\
examples:
  opgrip results merge zoo-*-of-16.json -o zoo.json              shards of one replay, from opreplay --shard
  opgrip results merge part1.json part2.json -o all.json         parts of one replay, from --start and --stop
  opgrip results merge mon.parquet tue.parquet -o week.parquet   repeats, so that compare knows how much times vary
"""

MOST_NAMED = 20  # maximum number of missing shards to list


def prepare_merge(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="results file, or run of the results store")
    add_store(parser)
    add_output(parser, "results file to write", required=True)


@verb("results merge", "merge several results files into one", MERGE_EXAMPLES, prepare_merge)
def run_merge(args: argparse.Namespace) -> int:
    from opgrip.cli.output_files import check_writable
    from opgrip.replay.reports.comparison.results_store import merge_runs, missing_shards
    from opgrip.replay.reports.outcome import write_results

    check_writable(args.output, args.force)
    merged = merge_runs(read_runs(args.store, *args.runs))
    write_results(merged.rows, merged.header, args.output, args.force)
    report_output(args, counted(len(merged), "row"))
    if missing := missing_shards(merged.header):
        which = ", ".join(map(str, missing[:MOST_NAMED])) + (" and more" if len(missing) > MOST_NAMED else "")
        print(f"{args.prog}: {counted(len(missing), 'shard')} missing: {which}", file=sys.stderr)
    return 0


SCORE_EXAMPLES = """\
examples:
  opgrip results score latest
  opgrip results score zoo.parquet --baseline other-machine.json.zst
  opgrip results score one.parquet --baseline other.parquet      two replays of trace:zoo_500
  opgrip results score zoo.parquet --json > score.json

docs/score.md explains the score.
"""


def prepare_score(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument(
        "--baseline",
        metavar="FILE",
        help="results to compare with: a file that opgrip zoo baseline wrote, or, for a distilled trace, another "
        "replay of it (default: the baseline that ships, or the times in the distilled trace)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON: a list with one object per mode")


@verb(
    "results score",
    "print how fast a device or compiler runs the zoo's models, relative to a baseline",
    SCORE_EXAMPLES,
    prepare_score,
)
def run_score(args: argparse.Namespace) -> int:
    from opgrip.errors import UserError
    from opgrip.zoo.scoring.baselines import read_baselines
    from opgrip.zoo.scoring.score_table import plain_of, print_scores
    from opgrip.zoo.scoring.scores import distilled_scores, represented_times, score_of

    baseline = args.baseline
    (results,) = read_runs(args.store, args.which)
    if represented_times(results.header) is not None:
        scores = distilled_scores(results, None if baseline is None else read_runs(args.store, baseline)[0])
    else:
        scores = score_of(results, read_baselines(None if baseline is None else Path(baseline)))
    if not scores:
        raise UserError("these results do not belong to the zoo", "create them with opreplay zoo -o results.parquet")
    if args.json:
        json.dump([plain_of(score) for score in scores], sys.stdout, indent=1)
        print()
    else:
        print_scores(scores, sys.stdout)
    return 0


SHOW_EXAMPLES = """\
examples:
  opgrip results show latest
  opgrip results show 20261123T101500-bert-1f2e3d --top 20
  opgrip results show nightly.parquet
"""


MOST_OF_FACT = 400  # maximum number of characters of a fact, such as what the cases of a distilled trace represent


def prepare_show(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument("--top", type=positive, metavar="N", help="number of rows to show (default: all)")


@verb("results show", "show where and how a run was made, and its rows", SHOW_EXAMPLES, prepare_show)
def run_show(args: argparse.Namespace) -> int:
    from opgrip.replay.reports.results_table import print_results
    from opgrip.replay.results.results import summarize

    (results,) = read_runs(args.store, args.which)
    nested_names = ("environment", "accelerator", "ceilings")
    facts = {name: value for name, value in results.header.items() if name not in nested_names}
    environment = results.header.get("environment", {})
    lines = [*facts.items(), *(item for item in environment.items() if item not in facts.items())]
    width = max((len(printable(name)) for name, _ in lines), default=0)
    for name, value in lines:
        if isinstance(value, dict):
            is_long = {key: isinstance(item, dict | list) and len(item) > MOST_ITEMS for key, item in value.items()}
            value = {key: f"{len(item):,} items" if is_long[key] else item for key, item in value.items()}
        text = printable(value if isinstance(value, str) else json.dumps(value))
        shown = text if len(text) <= MOST_OF_FACT else f"{text[:MOST_OF_FACT]}... ({len(text):,} characters)"
        print(f"{printable(name):<{width}}  {shown}")
    rows = list(results.rows)
    print()
    print_results(rows[: args.top], sys.stdout)
    print(summarize(rows))
    return 0


MOST_ITEMS = 20  # maximum number of items of a list or object in a fact; of a longer one only the number is shown


EXAMPLES = """\
examples:
  opgrip compare main.json branch.json
  opgrip compare main.json branch.json --gate 'slower<=5%' --gate 'failed<=0' -o comparison.md
  opgrip compare main.json branch.json --gate 'total<=2%' --gate 'op<=10%'
  opgrip compare latest~1 latest --by family          the two newest runs of the store
  opgrip compare a100.json h100.json l4.json --by op  each of several runs with the first

To call a case faster or slower, compare must know how much replays vary: replay with --repeats 5.
exit status: 0 if all gates passed, 1 if one failed, 2 for a usage error, 3 if one is undecided and none failed
gates: slower (each row), total, op, module, family, mode (each group) <=PERCENT; failed, changed, missing <=ROWS
"""


def prepare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "base", metavar="BASE", help="baseline: a results file, or a stored run (see opgrip results list)"
    )
    parser.add_argument("new", nargs="+", metavar="NEW", help="results file or run to compare with the baseline")
    add_store(parser)
    parser.add_argument("--gate", action="append", default=[], metavar="CONDITION", help=GATE_HELP)
    parser.add_argument(
        "--same",
        type=percent,
        metavar="PERCENT",
        help="treat times as equal if they differ by at most this percentage (default: 5%%)",
    )
    parser.add_argument(
        "--by",
        choices=("op", "module", "family", "mode"),
        help="also print a table of the cases, grouped by operator, module, kind of operator (family) or mode",
    )
    parser.add_argument("--all", action="store_true", help="also show unchanged and undecided rows")
    add_output(parser, "write all rows to this file: .json, .csv, .md or .xml (JUnit)")


GATE_HELP = (
    "condition to check, with exit status 1 if it fails and 3 if it is undecided: slower<=5%% for each row, "
    "total<=5%%, op<=5%% (or module, family, mode) for each group, failed<=0, changed<=0, missing<=0; can be repeated"
)


@verb("compare", "compare results and report faster and slower cases", EXAMPLES, prepare)
def run(args: argparse.Namespace) -> int:
    from opgrip.cli.output_files import check_writable
    from opgrip.replay.reports.comparison.comparison import compare, exit_status, hold_all, margin_for, parse_gate
    from opgrip.replay.reports.comparison.comparison_report import form_for, print_comparison, write_comparisons

    gates = list(map(parse_gate, args.gate))
    if args.output is not None:
        form_for(args.output)
        check_writable(args.output, args.force)
    base, *others = read_runs(args.store, args.base, *args.new)
    margin = args.same if args.same is not None else margin_for(gates)
    comparisons = [compare(base, new, margin) for new in others]
    held = [hold_all(gates, comparison) for comparison in comparisons]
    for comparison, outcomes in zip(comparisons, held, strict=True):
        print_comparison(comparison, sys.stdout, args.by, args.all, outcomes)
    if args.output is not None:
        write_comparisons(comparisons, gates, args.output, args.force)
        report_output(args, counted(len(comparisons), "comparison"))
    return exit_status([item for outcomes in held for item in outcomes])
