"""Runs the calls of a trace again, and measures them."""

from opgrip.replay.benchmark import benchmark
from opgrip.replay.measuring.results import Result, load_results
from opgrip.replay.outcome import Results
from opgrip.replay.replay import replay

__all__ = ["Result", "Results", "benchmark", "load_results", "replay"]
