"""Parts of a trace as traces of their own: some steps, phases, modules, operators, a span of time."""

from opgrip.traces.analysis.trimming.outline import TracePart
from opgrip.traces.analysis.trimming.trim import Trimmed, trim

__all__ = ["TracePart", "Trimmed", "trim"]
