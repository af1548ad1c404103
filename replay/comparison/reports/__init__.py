"""Writes comparisons: for people, for programs, and for CI services."""
