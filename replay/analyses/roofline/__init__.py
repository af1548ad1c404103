"""The roofline: how near calls come to the machine's limits."""

from opgrip.replay.analyses.roofline.analysis import RooflineAnalysis

__all__ = ["RooflineAnalysis"]
