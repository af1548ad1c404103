"""Steps of `benchmarks/gpu_check.py`, and their references."""
