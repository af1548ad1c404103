"""Whether times hold on a busy machine: replays a trace on a quiet one, then beside programs that use the cores.

    python benchmarks/contended.py                                  # the trace of the built-in detector
    python benchmarks/contended.py mmdet.jsonl --burners 1,2

A row holds if its median is within 25 percent of the quiet one, or if its status says that its time does not count.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass

TRACE = Path(__file__).parents[1] / "traces" / "faster_rcnn.jsonl"
WITHIN = 0.25
"""Relative distance from the quiet median up to which a time holds."""
LEAST_SHARE = 0.95
"""Share of the rows that have to hold."""
