"""Comparison of a mode's results with the results of the reference mode, which is usually eager."""
