"""Replay of the calls of a trace, and measurement of their times."""

from typing import TYPE_CHECKING

from opgrip.cli.plugins import lazy_names

if TYPE_CHECKING:
    from opgrip.replay.command.benchmark import Judgement as Judgement
    from opgrip.replay.command.benchmark import benchmark as benchmark
    from opgrip.replay.command.benchmark import judge as judge
    from opgrip.replay.command.replay import replay as replay
    from opgrip.replay.reports.comparison.comparison import Comparison as Comparison
    from opgrip.replay.reports.comparison.comparison import compare as compare
    from opgrip.replay.reports.outcome import Results as Results
    from opgrip.replay.results.results import Result as Result

__all__ = ["Comparison", "Judgement", "Result", "Results", "benchmark", "compare", "judge", "replay"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "Comparison": "opgrip.replay.reports.comparison.comparison",
        "Judgement": "opgrip.replay.command.benchmark",
        "Result": "opgrip.replay.results.results",
        "Results": "opgrip.replay.reports.outcome",
        "benchmark": "opgrip.replay.command.benchmark",
        "compare": "opgrip.replay.reports.comparison.comparison",
        "judge": "opgrip.replay.command.benchmark",
        "replay": "opgrip.replay.command.replay",
    },
)
