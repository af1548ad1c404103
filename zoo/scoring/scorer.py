"""The scores that `opreplay` prints below the table of its results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from opgrip.replay.reports.outcome import Results, scorers
from opgrip.traces.zoo.manifest import FIELD
from opgrip.zoo.scoring.baselines import read_baselines
from opgrip.zoo.scoring.score_table import LEAST_COVERED, print_scores
from opgrip.zoo.scoring.scores import distilled_scores, represented_times, score_of


class ZooScorer:
    def check(self, header: Mapping[str, Any]) -> None:
        if FIELD in header:
            represented_times(header)

    def print_scores(self, results: Results, file: IO[str]) -> None:
        if FIELD in results.header:
            print_scores(distilled_scores(results), file, LEAST_COVERED)

    def against(self, baseline: Path | None) -> Callable[[Results, IO[str]], None]:
        times = read_baselines(baseline)
        return lambda results, file: print_scores(score_of(results, times), file, LEAST_COVERED)


scorers.register("zoo")(ZooScorer())
