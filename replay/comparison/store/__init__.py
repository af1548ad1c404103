"""Keeps results, by the machine and device that they are of, and finds them again."""
