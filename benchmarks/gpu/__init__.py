"""The steps that `benchmarks/gpu_check.py` takes, and what they are judged by."""
