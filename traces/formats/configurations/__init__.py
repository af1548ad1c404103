"""Operator configurations: arguments that stand for many cases, of which each is computed by its number."""
