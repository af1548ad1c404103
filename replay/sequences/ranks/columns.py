"""Columns that the replay of a step adds to a row, of one process and of several ranks."""

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


@dataclass(frozen=True, slots=True)
class RankColumns(Columns):
    """Whose calls a row is of; of collectives, what they moved, and what they waited for."""

    rank: int | None = column("of several, the rank whose calls these are", heading="rank")
    group_ranks: str | None = column("of a collective, the ranks that took part, such as `0,1`")
    exchanged_bytes: int | None = column("of a collective, the size that its bandwidths refer to", "bytes")
    exchange_us: float | None = column(
        "of a collective, median time from the last rank's coming to the last's end", "us"
    )
    wait_us: float | None = column("median time that the rank had waited for the last one by then", "us")
    held_us: float | None = column("median time that the collective held the rank's thread up", "us")
    algorithm_gb_per_s: float | None = column("`exchanged_bytes` over `exchange_us`", "GB/s")
    bus_gb_per_s: float | None = column("that, times the factor that nccl-tests define for its kind and ranks", "GB/s")
