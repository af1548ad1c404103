"""Runs all calls of a trace in their order, on what flows between them."""
