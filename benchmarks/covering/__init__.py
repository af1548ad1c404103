"""What `benchmarks/coverage.py` tries: one model in one run, natively, captured, audited and replayed."""
