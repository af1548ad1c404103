"""Nsight Systems: a replay under `nsys profile`, and what its report says of each row."""

from opgrip.replay.analyses.nsys.nsys import Nsys, NsysAnalysis

__all__ = ["Nsys", "NsysAnalysis"]
