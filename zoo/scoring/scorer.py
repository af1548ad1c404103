"""The scores that `opreplay` prints below the table of its results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from opgrip.replay.reports.outcome import scorers
from opgrip.traces.zoo.manifest import FIELD

if TYPE_CHECKING:
    from opgrip.replay.reports.outcome import Results


class ZooScorer:
    def check(self, header: Mapping[str, Any]) -> None:
        if FIELD in header:
            from opgrip.zoo.scoring.scores import represented_times

            represented_times(header)

    def print_scores(self, results: Results, file: IO[str]) -> None:
        if FIELD in results.header:
            from opgrip.zoo.scoring.score_table import LEAST_COVERED, print_scores
            from opgrip.zoo.scoring.scores import distilled_scores

            print_scores(distilled_scores(results), file, LEAST_COVERED)

    def against(self, baseline: Path | None) -> Callable[[Results, IO[str]], None]:
        from opgrip.zoo.scoring.baselines import read_baselines
        from opgrip.zoo.scoring.score_table import LEAST_COVERED, print_scores
        from opgrip.zoo.scoring.scores import score_of

        times = read_baselines(baseline)
        return lambda results, file: print_scores(score_of(results, times), file, LEAST_COVERED)


scorers.register("zoo")(ZooScorer())
