"""Medians and quantiles of values that each stand for several, as pandas has them of all of these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

COUNT = "count"
"""The column of a table of distinct calls that says how many each row stands for."""


def counts_of(calls: pd.DataFrame) -> pd.Series[int]:
    """How many calls each row of a table of calls, or of distinct ones, stands for."""
    return calls[COUNT] if COUNT in calls else pd.Series(1, index=calls.index)


def quantiles(values: pd.Series[Any], groups: Any, counts: pd.Series[int], share: float = 0.5) -> pd.Series[float]:
    """Of each group the value below which so large a share of its values lies, between two of them in proportion.

    Values that are nan stand for nothing; a group of them alone is nan.

    Parameters
    ----------
    counts : how many each value stands for
    """
    names = pd.Series(np.asarray(groups), index=values.index)
    table = pd.DataFrame({"group": names, "value": values.astype(float), COUNT: counts})
    own = table.dropna().sort_values(["group", "value"])
    ends = own.groupby("group")[COUNT].cumsum().to_numpy()
    sizes = own.groupby("group", sort=True)[COUNT].sum()
    rows = own.groupby("group", sort=True).size().to_numpy()
    place = share * (sizes.to_numpy() - 1)
    # one search for all groups: each has its own part of a range that grows
    offsets = np.cumsum(sizes.to_numpy()) - sizes.to_numpy()
    until = ends + np.repeat(offsets, rows)
    lower = np.searchsorted(until, offsets + np.floor(place), side="right")
    upper = np.searchsorted(until, offsets + np.ceil(place), side="right")
    column = own["value"].to_numpy()
    low, high = column[lower], column[upper]
    middle = low + (high - low) * (place - np.floor(place))
    if share == 0.5:
        # as the mean of two, which differs in the last digit
        middle = np.where(low == high, low, (low + high) / 2)
    return pd.Series(middle, index=sizes.index).reindex(np.unique(names.dropna()))


def usual_ns(calls: pd.DataFrame) -> pd.Series[Any]:
    """Return durations of calls, as they would be had page faults taken as long as is usual on the machine."""
    return calls["duration_ns"] - calls["slow_memory_ns"]


@dataclass(frozen=True, slots=True)
class Typical:
    """What stands for the durations of calls that were perturbed.

    Attributes
    ----------
    median_ns : by signature, the median of the calls that were not perturbed; of all, where those were interrupted
    was_interrupted : by signature, whether there was one such call alone, and it took longer than all others
    """

    median_ns: pd.Series[float]
    was_interrupted: pd.Series[bool]

    def unperturbed_ns(self, calls: pd.DataFrame) -> pd.Series[Any]:
        """Durations of calls; of those that were perturbed, what stands for them where there is such."""
        signature, durations = calls["signature"], usual_ns(calls)
        median_ns = signature.map(self.median_ns)
        is_replaced = calls["perturbed"] | signature.map(self.was_interrupted)
        return durations.where(~is_replaced | median_ns.isna(), median_ns)


def typical_of(calls: pd.DataFrame) -> Typical | None:
    """What stands for perturbed ones among all calls of a trace, or all distinct ones; None where there are none."""
    durations, perturbed, counts = usual_ns(calls), calls["perturbed"], counts_of(calls)
    if not perturbed.any():
        return None
    signature = calls["signature"]
    others = quantiles(durations.where(~perturbed), signature, counts)
    count, size = (number.groupby(signature).sum() for number in (counts.where(~perturbed, 0), counts))
    was_interrupted = (count == 1) & (size > 2) & (others == durations.groupby(signature).max())
    return Typical(others.where(~was_interrupted, quantiles(durations, signature, counts)), was_interrupted)


def unperturbed_ns(calls: pd.DataFrame) -> pd.Series[Any]:
    """Durations of all calls of a trace, or all distinct ones; of those that were perturbed, what others take."""
    typical = typical_of(calls)
    return calls["duration_ns"] if typical is None else typical.unperturbed_ns(calls)
