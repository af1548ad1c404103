"""Output formats of results. A format is one file here, or an entry point `opgrip.reports` of another package."""

from opgrip.replay.reports.report import Report, report, report_for, reports

__all__ = ["Report", "report", "report_for", "reports"]
