"""One call of a trace as a Python file that only needs torch."""

from opgrip.traces.scripts.script import script_of

__all__ = ["script_of"]
