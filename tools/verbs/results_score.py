"""`opgrip results score`: the score of a device or compiler from stored results."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from opgrip.cli.command import add_debug
from opgrip.tools.verbs.results_list import add_run
from opgrip.tools.verbs.verb import Verb, verbs

EXAMPLES = """\
examples:
  opgrip results score latest
  opgrip results score zoo.parquet --baseline other-machine.json.zst
  opgrip results score one.parquet --baseline other.parquet      two replays of trace:zoo_500
  opgrip results score zoo.parquet --json > score.json

docs/benchmark.md says how the number comes about.
"""


def prepare(parser: argparse.ArgumentParser) -> None:
    """Add the options of the verb."""
    add_run(parser)
    parser.add_argument(
        "--baseline",
        metavar="FILE",
        help="file that opgrip zoo baseline wrote (default: the one that ships); for results of a distilled trace, "
        "another run of the same trace (default: the times that it has)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON: a list of one object a mode")
    add_debug(parser)


def run(args: argparse.Namespace) -> int:
    """Print one line per model and the total, as opreplay does after its last trace."""
    from opgrip.errors import UserError
    from opgrip.replay.comparison.results_store import Store
    from opgrip.replay.outcome import read_run
    from opgrip.zoo.scoring import distilled_scores, print_scores, read_baselines, score_of, standing_of
    from opgrip.zoo.scoring.score_table import plain_of

    store, baseline = Store(args.store), args.baseline
    results = read_run(store.find(args.which))
    if standing_of(results.header) is not None:
        scores = distilled_scores(results, None if baseline is None else read_run(store.find(baseline)))
    else:
        scores = score_of(results, read_baselines(None if baseline is None else Path(baseline)))
    if not scores:
        raise UserError("these results are of no zoo", "make some with opreplay zoo -o results.parquet")
    if args.json:
        json.dump([plain_of(score) for score in scores], sys.stdout, indent=1)
        print()
    else:
        print_scores(scores, sys.stdout)
    return 0


verbs.register("results score")(Verb("how fast a device or a compiler runs what models run", EXAMPLES, prepare, run))
