"""Validation: problems of a trace's form, references, times and totals."""

from opgrip.traces.analysis.validation.validate import Finding, Validation, validate

__all__ = ["Finding", "Validation", "validate"]
