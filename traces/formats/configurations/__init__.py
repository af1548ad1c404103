"""Operator configurations: files that describe many cases, each of which can be computed from its number."""
