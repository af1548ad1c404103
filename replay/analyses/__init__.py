"""Analyses that add to rows. An analysis is a file or folder here, or an entry point `opgrip.analyses`."""

from opgrip.replay.analyses.analysis import Analysis, AnalysisSession, analyses, in_order

__all__ = ["Analysis", "AnalysisSession", "analyses", "in_order"]
