"""One call of a trace as a Python file that only needs torch."""
