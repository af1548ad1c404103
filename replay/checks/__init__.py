"""Comparison of the results of a mode with the results of eager, the reference."""
