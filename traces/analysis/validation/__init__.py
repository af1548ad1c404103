"""What is wrong in a trace: its form, numbers that refer to nothing, times that cross, totals."""

from opgrip.traces.analysis.validation.validate import Finding, Validation, validate

__all__ = ["Finding", "Validation", "validate"]
