"""Runs the calls of a trace again, and measures them."""

from opgrip.replay.outcome import Results
from opgrip.replay.replay import replay
from opgrip.replay.results import Result, load_results

__all__ = ["Result", "Results", "load_results", "replay"]
