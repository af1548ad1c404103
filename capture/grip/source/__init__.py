"""Conversion of a live function into a self-contained module, and the sample folder around it."""
