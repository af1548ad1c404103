"""Runs the calls of a trace again, and measures them."""

from opgrip.replay.measure import measure_cases
from opgrip.replay.results import Result, load_results

__all__ = ["Result", "load_results", "replay"]
