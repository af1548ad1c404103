"""Names of the ways to time a run: each alone, many at once, or by the device's own clock."""

from __future__ import annotations

DISCRETE, CONTINUOUS, EVENTS, GRAPH = "discrete", "continuous", "events", "graph"
METHODS = (DISCRETE, CONTINUOUS, EVENTS, GRAPH)
SEQUENCE = "sequence"
"""Of calls that were timed where they run in a whole sequence."""
ON_DEVICE = (EVENTS, GRAPH)
"""Methods that need an accelerator's own clock."""
