"""Blocks of calls written to files: flushing, limits, and the flight recorder."""
