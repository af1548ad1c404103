"""Compares runs: which cases became faster or slower, and how sure that is."""

from opgrip.replay.comparison.comparison import Comparison, compare

__all__ = ["Comparison", "compare"]
