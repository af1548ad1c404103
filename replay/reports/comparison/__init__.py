"""Comparison of two runs of a replay: which cases became faster or slower, and how certain that is."""
