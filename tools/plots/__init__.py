"""Pictures of results for papers. A kind is a file here, or an entry point `opgrip.plots` of another package."""

from opgrip.tools.plots.plot import Plot, Request, plots

__all__ = ["Plot", "Request", "plots"]
