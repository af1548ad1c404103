"""Conversion of one call of a trace to a Python script that only needs torch."""
