"""Analyses of a replay, which add columns to its rows or print more about them.

An analysis is a file or folder of this package, or an entry point `opgrip.analyses`.
"""

from opgrip.replay.analyses.analysis import Analysis, AnalysisSession, analyses, in_order

__all__ = ["Analysis", "AnalysisSession", "analyses", "in_order"]
