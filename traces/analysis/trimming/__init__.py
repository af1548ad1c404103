"""Trimming: writing a part of a trace as a separate trace, selected by steps, phases, modules, operators or time."""

from opgrip.traces.analysis.trimming.outline import TracePart
from opgrip.traces.analysis.trimming.trim import Trimmed, trim

__all__ = ["TracePart", "Trimmed", "trim"]
