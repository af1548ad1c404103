"""Runs the calls of a trace again, and measures them."""

from typing import TYPE_CHECKING

from opgrip.cli.lazy_packages import load_on_demand

if TYPE_CHECKING:
    from opgrip.replay.benchmark import benchmark as benchmark
    from opgrip.replay.comparing.comparison import Comparison as Comparison
    from opgrip.replay.comparing.comparison import compare as compare
    from opgrip.replay.measuring.results import Result as Result
    from opgrip.replay.outcome import Results as Results
    from opgrip.replay.replay import replay as replay
    from opgrip.replay.reports.cells import load_results as load_results

__all__ = ["Comparison", "Result", "Results", "benchmark", "compare", "load_results", "replay"]

PUBLIC = {
    "Comparison": "opgrip.replay.comparing.comparison",
    "Result": "opgrip.replay.measuring.results",
    "Results": "opgrip.replay.outcome",
    "benchmark": "opgrip.replay.benchmark",
    "compare": "opgrip.replay.comparing.comparison",
    "load_results": "opgrip.replay.reports.cells",
    "replay": "opgrip.replay.replay",
}
load_on_demand(__name__)
