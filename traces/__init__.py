"""The trace: its records, its files, and what is kept of values."""

from typing import TYPE_CHECKING

from opgrip.cli.lazy_packages import load_on_demand

if TYPE_CHECKING:
    from opgrip.errors import UserError as UserError
    from opgrip.traces.reader import TraceReader as TraceReader
    from opgrip.traces.reader import read as read
    from opgrip.traces.trace import Trace as Trace
    from opgrip.traces.trace import load as load

__all__ = ["Trace", "TraceReader", "UserError", "load", "read"]

PUBLIC = {
    "Trace": "opgrip.traces.trace",
    "TraceReader": "opgrip.traces.reader",
    "UserError": "opgrip.errors",
    "load": "opgrip.traces.trace",
    "read": "opgrip.traces.reader",
}
load_on_demand(__name__)
