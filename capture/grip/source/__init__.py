"""Conversion of a live function to a self-contained module."""
