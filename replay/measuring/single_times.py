"""The time of every single run, kept on request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from opgrip.replay.measuring.columns import Columns, column
from opgrip.traces.options import option, titled

if TYPE_CHECKING:
    from opgrip.replay.timing.samples import Samples


@titled("how they are timed")
@dataclass(frozen=True, slots=True)
class SingleTimesOptions:
    """Whether the times of single runs are kept."""

    keep_samples: bool = option(
        False,
        "keep the time of every run in the column times_us, for distributions of your own",
        only=("single cases",),
    )


@dataclass(frozen=True, slots=True)
class SingleTimesColumns(Columns):
    """What single runs took."""

    times_us: list[float] | None = column("of each timed run, in their order; in .csv as JSON writes a list", "us")


def single_times(samples: Samples) -> SingleTimesColumns:
    """The times of a row's runs."""
    return SingleTimesColumns([time_ns / 1e3 for time_ns in samples.in_order])
