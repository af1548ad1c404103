"""PARAM's operator configurations, which describe many cases; each case can be computed from its index."""

from opgrip.traces.formats.configurations import param as param
