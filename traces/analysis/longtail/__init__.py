"""Long-tail functions: Python functions that consist of many small operators."""

from opgrip.traces.analysis.longtail.function_costs import CaptureCost
from opgrip.traces.analysis.longtail.functions import (
    LongTail,
    LongTailFunction,
    bandwidth_of,
    find_longtail,
    print_longtail,
    write_rows,
)

__all__ = [
    "CaptureCost",
    "LongTail",
    "LongTailFunction",
    "bandwidth_of",
    "find_longtail",
    "print_longtail",
    "write_rows",
]
