"""Figures that `benchmarks/thresholds.py` measures, and their thresholds."""
