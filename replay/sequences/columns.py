"""What the replay of a whole sequence adds to a row."""

from __future__ import annotations

from dataclasses import dataclass

from opgrip.replay.results.columns import Columns, column


@dataclass(frozen=True, slots=True)
class SequenceColumns(Columns):
    """How the calls of a row ran that did not all run on what flows, and their time on the host."""

    substituted: int | None = column(
        "of `count`, the calls that ran on arguments drawn for them alone; empty for none", heading="substituted"
    )
    not_run: int | None = column("of `count`, the calls that did not run at all; empty for none", heading="not run")
    redrawn: int | None = column(
        "of `count`, the calls that had values drawn anew in the memory that they take; empty for none"
    )
    replayed_host_us: float | None = column(
        "median time of the calls on the host, where `median_us` is by the device's clock",
        "us",
        heading="replayed host us",
    )
