"""What rows are grouped by, where times are summed up or drawn."""

from __future__ import annotations

from collections.abc import Callable

from opgrip.replay.cases.families import family_of
from opgrip.replay.measuring.results import Result

GROUPS: dict[str, Callable[[Result], str]] = {
    "op": lambda row: row.op,
    "module": lambda row: row.module or "(outside)",
    "family": lambda row: family_of(row.op),
    "mode": lambda row: row.mode,
}
"""By name, the group of a row."""
