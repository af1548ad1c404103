"""Parts of a trace as traces of their own: some steps, phases, modules, operators, a span of time."""

from opgrip.traces.analysis.trimming.outline import Part
from opgrip.traces.analysis.trimming.trim import Trimmed, trim

__all__ = ["Part", "Trimmed", "trim"]
