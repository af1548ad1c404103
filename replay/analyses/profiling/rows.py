"""Which row of a replay it is that a profiler saw."""

from __future__ import annotations

from opgrip.replay.cases.ways import Point, Way
from opgrip.replay.results.results import Result

Key = tuple[int, str]
"""A case, and the words that tell its row from its others."""


def key_of(row: Result) -> Key:
    """The key of a row's ranges."""
    point = Point(row.threads, row.batch_scale, row.streams)
    return row.case, Way(0, row.values, row.direction, row.mode, point).label


def why_unseen(own: Result | None) -> str:
    """Why a profiler saw nothing of a row, whose run under it gave this; None where there was none."""
    if own is None:
        return "it was not run again"
    return own.error or f"it was {own.status} and is not in the report"
