"""Repeated, timed runs of a call under given conditions."""
