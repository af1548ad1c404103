"""What a row tells of the ways in which calls of its signature behave."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from opgrip.replay.results.columns import Columns, column
from opgrip.replay.results.results import Result

if TYPE_CHECKING:
    from opgrip.replay.cases.cases import Case
    from opgrip.replay.timing.samples import Samples


@dataclass(frozen=True, slots=True)
class BehaviourColumns(Columns):
    """Where calls of a signature take other times in some places of a program than in others."""

    place: str | None = column("module, function and line of a call that behaves as those of the row do")
    behaviour_shares: list[float] | None = column(
        "without it: of its calls, the shares that behave alike, the largest first; each ran with the values met there",
        several=True,
    )
    behaviours_captured_us: list[float] | None = column("the median captured times of these", "us", several=True)
    behaviours_us: list[float] | None = column("the median times of their runs", "us", several=True)


def shares_of(case: Case) -> list[float]:
    """The share of a case's calls that each of its variants stands for; empty where that is not known."""
    if len(case.behaviours) != 1 + len(case.variants):
        return []
    counts = [len(item.calls) for item in case.behaviours]
    return [number / sum(counts) for number in counts]


def telling_behaviours(result: Result, case: Case, samples: Samples) -> Result:
    """A row with how the calls of each place fared, where there are several ways."""
    if len(case.behaviours) == 1:
        return result.adding(BehaviourColumns(place=case.behaviours[0].place))
    shares = shares_of(case)
    medians = [samples.median_us_of(index) for index in range(len(shares))]
    known = [median for median in medians if median is not None]
    if not shares or len(known) < len(medians):
        return result
    captured = [item.captured_us for item in case.behaviours]
    return result.adding(
        BehaviourColumns(behaviour_shares=shares, behaviours_captured_us=captured, behaviours_us=known)
    )
