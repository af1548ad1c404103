"""One HTML file of results and traces, which opens offline: charts by Plotly, tables by DataTables."""

from opgrip.tools.report.page import make_page

__all__ = ["make_page"]
