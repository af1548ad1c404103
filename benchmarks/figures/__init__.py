"""Figures that `benchmarks/held.py` measures, and their thresholds."""
