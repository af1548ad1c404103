"""What is added to rows. An analysis is a file or folder here, or an entry point `opgrip.analyses` of a package."""

from opgrip.replay.analyses.analysis import Analysis, Session, analyses, in_order

__all__ = ["Analysis", "Session", "analyses", "in_order"]
