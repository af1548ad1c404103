"""Comparison of two runs of a replay: which cases became faster or slower, and how certain that is."""

from opgrip.replay.comparison.comparison import Comparison, compare

__all__ = ["Comparison", "compare"]
