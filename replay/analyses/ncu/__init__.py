"""Nsight Compute: run a replay's cases under `ncu` in batches, and read its reports."""

from opgrip.replay.analyses.ncu.analysis import NcuAnalysis

__all__ = ["NcuAnalysis"]
