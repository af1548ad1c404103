"""Traces of several ranks of one program: which collectives they met in, on one clock, and who waited for whom."""
