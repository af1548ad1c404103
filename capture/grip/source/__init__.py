"""Conversion of a live function to a self-contained module, and the sample folder that contains this module."""
