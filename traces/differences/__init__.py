"""What differs between two traces, whatever numbers each gives its signatures."""

from opgrip.traces.differences.compare import KINDS, Difference, Row, Tolerances, compare_traces
from opgrip.traces.differences.files import check_form, write_difference

__all__ = ["KINDS", "Difference", "Row", "Tolerances", "check_form", "compare_traces", "write_difference"]
