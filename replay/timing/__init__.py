"""Repeated, timed runs of calls, with a chosen cache state and clock."""
