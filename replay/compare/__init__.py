"""Compares runs: which cases became faster or slower, and how sure that is."""

from opgrip.replay.compare.comparison import Comparison, compare

__all__ = ["Comparison", "compare"]
