"""How far a call is from what the machine can give: the work of calls, the machine's ceilings, and both together."""

from opgrip.replay.analyses.roofline.analysis import RooflineAnalysis

__all__ = ["RooflineAnalysis"]
