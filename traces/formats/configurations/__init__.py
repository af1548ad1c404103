"""Operator configurations: descriptions of many cases, each of which is computed from its number."""
