"""Traces loaded into memory, and tables of their calls."""
