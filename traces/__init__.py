"""The trace: its records, its files, and the value models of its tensors."""

from typing import TYPE_CHECKING

from opgrip.cli.plugins import lazy_names

if TYPE_CHECKING:
    from opgrip.errors import UserError as UserError
    from opgrip.traces.io.reader import TraceReader as TraceReader
    from opgrip.traces.io.reader import read as read
    from opgrip.traces.table.trace import Trace as Trace
    from opgrip.traces.table.trace import load as load

__all__ = ["Trace", "TraceReader", "UserError", "load", "read"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "Trace": "opgrip.traces.table.trace",
        "TraceReader": "opgrip.traces.io.reader",
        "UserError": "opgrip.errors",
        "load": "opgrip.traces.table.trace",
        "read": "opgrip.traces.io.reader",
    },
)
