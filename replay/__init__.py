"""Runs the calls of a trace again, and measures them."""

from typing import TYPE_CHECKING

from opgrip.traces.lazy import load_on_demand

if TYPE_CHECKING:
    from opgrip.replay.benchmark import benchmark as benchmark
    from opgrip.replay.measuring.results import Result as Result
    from opgrip.replay.outcome import Results as Results
    from opgrip.replay.replay import replay as replay
    from opgrip.replay.reports.cells import load_results as load_results

__all__ = ["Result", "Results", "benchmark", "load_results", "replay"]

PUBLIC = {
    "Result": "opgrip.replay.measuring.results",
    "Results": "opgrip.replay.outcome",
    "benchmark": "opgrip.replay.benchmark",
    "load_results": "opgrip.replay.reports.cells",
    "replay": "opgrip.replay.replay",
}
load_on_demand(__name__)
