"""The HTML report: one offline file that shows results and traces, with charts by Plotly and tables by DataTables."""

from opgrip.tools.report.page import make_page

__all__ = ["make_page"]
