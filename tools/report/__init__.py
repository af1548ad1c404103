"""The HTML report: one offline file that shows results and traces."""

from opgrip.tools.report.page import make_page

__all__ = ["make_page"]
