"""One call of a trace as a Python file that runs it again with torch alone."""

from opgrip.traces.scripts.script import script_of

__all__ = ["script_of"]
