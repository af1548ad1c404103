"""Runs the calls of a trace again, and measures them."""

from opgrip.replay.benchmark import benchmark
from opgrip.replay.measuring.results import Result
from opgrip.replay.outcome import Results
from opgrip.replay.replay import replay
from opgrip.replay.reports.cells import load_results

__all__ = ["Result", "Results", "benchmark", "load_results", "replay"]
