"""Readers of operator configurations: files that describe many cases, each of which can be computed from its index."""
