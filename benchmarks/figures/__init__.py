"""The figures that `benchmarks/held.py` measures, and the bounds that they are held to."""
