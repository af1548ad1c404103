"""Content of another tool's file that could not be converted to calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from opgrip.cli.command import counted
from opgrip.errors import UserError

if TYPE_CHECKING:
    from opgrip.traces.table.trace import Trace

MOST = 3
"""number of operators that are listed with reasons; the others are only counted"""


def unconverted(trace: Trace) -> str | None:
    """Return which content of a converted file became no calls, and why; None for a complete or captured trace."""
    if "converted_from" not in trace.header or trace.end is None or not trace.end.dropped:
        return None
    dropped = sorted(trace.end.dropped, key=lambda item: -item.count)
    calls = counted(sum(item.count for item in dropped), "call")
    told = "; ".join(f"{item.count:,} {item.op}: {item.reason}" for item in dropped[:MOST])
    more = f"; and {counted(len(dropped) - MOST, 'other')}: see opgrip trace info" if len(dropped) > MOST else ""
    return f"{calls} of the file not converted: {told}{more}"


def no_calls(trace: Trace) -> UserError:
    """Return the error for a trace without calls, with the reason if it is known."""
    if lost := unconverted(trace):
        return UserError("nothing of the file can be replayed", lost)
    return UserError("the trace contains no calls", "capture a program that runs some")
