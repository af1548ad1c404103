"""Plots of results. A kind is one file here, or an entry point `opgrip.plots` of another package."""

from opgrip.replay.plots.plot import Plot, PlotRequest, PlottedRun, plots

__all__ = ["Plot", "PlotRequest", "PlottedRun", "plots"]
