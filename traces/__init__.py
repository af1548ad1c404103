"""The trace: its records, its files, and what is kept of values."""

from opgrip.traces.errors import UserError
from opgrip.traces.reader import TraceReader, read
from opgrip.traces.trace import Trace, load

__all__ = ["Trace", "TraceReader", "UserError", "load", "read"]
