"""Trials of `benchmarks/coverage.py`: one model in one run, natively, captured, audited and replayed."""
