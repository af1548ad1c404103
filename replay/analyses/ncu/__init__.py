"""Nsight Compute: a replay's cases under `ncu`, a batch at a time, and what its reports say of each row."""

from opgrip.replay.analyses.ncu.analysis import NcuAnalysis

__all__ = ["NcuAnalysis"]
