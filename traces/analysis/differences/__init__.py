"""Differences between traces, independent of how each trace numbers its signatures."""

from opgrip.traces.analysis.differences.compare import (
    KINDS,
    OperatorRow,
    Row,
    Tolerances,
    TraceDifference,
    compare_sides,
    compare_traces,
    write_difference,
)
from opgrip.traces.analysis.differences.side import load_side, paths_of

__all__ = [
    "KINDS",
    "OperatorRow",
    "Row",
    "Tolerances",
    "TraceDifference",
    "compare_sides",
    "compare_traces",
    "load_side",
    "paths_of",
    "write_difference",
]
