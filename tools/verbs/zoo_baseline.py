"""`opgrip zoo baseline`: a baseline for scores from the results of a replay."""

from __future__ import annotations

import argparse
from pathlib import Path

from opgrip.cli.command import add_debug, counted, printable
from opgrip.tools.verbs.results_list import add_run
from opgrip.tools.verbs.verb import Verb, verbs

EXAMPLES = """\
examples:
  opreplay zoo --repeats 3 -o zoo.parquet
  opgrip zoo baseline zoo.parquet -o baseline.json.zst
  opreplay zoo --baseline baseline.json.zst
  opgrip zoo baseline mmseg.parquet --add-to baseline.json.zst -o both.json.zst

The rows that count are those under eager, with the values, threads, batch and caches of the program.
"""


def prepare(parser: argparse.ArgumentParser) -> None:
    """Add the options of the verb."""
    add_run(parser)
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE", help="a .json, .json.gz or .json.zst to write"
    )
    parser.add_argument(
        "--add-to",
        type=Path,
        metavar="BASELINE",
        help="also keep the traces of this baseline of the same machine, except those replayed again",
    )
    parser.add_argument("-f", "--force", action="store_true", help="replace an existing file")
    add_debug(parser)


def run(args: argparse.Namespace) -> int:
    """Write the baseline, and report its contents."""
    from opgrip.replay.comparison.results_store import Store
    from opgrip.replay.outcome import read_run
    from opgrip.zoo.scoring import added, baseline_of, read_baselines, write_baseline

    baseline = baseline_of(read_run(Store(args.store).find(args.which)))
    if args.add_to is not None:
        baseline = added(read_baselines(args.add_to), baseline)
    write_baseline(baseline, args.output, args.force)
    cases = sum(len(trace.cases) for trace in baseline.traces.values())
    machine = printable(baseline.machine)
    print(f"{counted(cases, 'case')} of {counted(len(baseline.traces), 'trace')}, {machine}: {args.output}")
    return 0


verbs.register("zoo baseline")(Verb("make what scores are held against", EXAMPLES, prepare, run))
