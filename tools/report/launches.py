"""What a page is told of a trace's launches: how many there are, and how many take hardly longer than launching."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd

from opgrip.replay.results.results import describe_shapes
from opgrip.traces.table.trace import Trace

SHORT_US = 10.0
"""What takes less is mostly the launch: to hand an operator or a kernel its work takes 2 to 10 us."""
SUMMED = ["calls", "launches", "time_us", "short", "short_us"]
"""What is told of a group: calls, launches, time, and the launches that are short and their time."""
POINTS_A_DECADE = 10
"""Of the curve over the time of a launch."""

Plain = dict[str, Any]


def describe_launches(trace: Trace, key_by_signature: Mapping[int, str]) -> Plain:
    """Launches of all calls, of modules, operators and cases, and their shares by the time of a launch.

    A launch is a kernel where the trace tells what calls ran on an accelerator, else an operator.

    Parameters
    ----------
    key_by_signature : the key of its case
    """
    launches = _launches(trace)
    shapes = {signature.number: describe_shapes(signature) for signature in trace.signatures}
    return {
        "are_kernels": bool(trace.kernels),
        "all": next(_sums(launches.assign(all="all"), ["all"]), ("all", 0, 0, 0, 0, 0)),
        "module": [(module or "(outside)", *figures) for module, *figures in _sums(launches, ["module"])],
        "op": list(_sums(launches, ["op"])),
        "case": [
            (op, *figures, shapes.get(number, ""), key_by_signature.get(number, ""))
            for op, number, *figures in _sums(launches, ["op", "signature"])
        ],
        "curve": list(_curve(launches)),
    }


def _launches(trace: Trace) -> pd.DataFrame:
    """One row a call: how much it launched, how long that took, and how much of it was short."""
    own = trace.own_calls
    launches = _per_call(trace, own["signature"])
    time_us = own["time_ns"] / 1e3
    of_launch = time_us / launches.where(launches > 0)
    # of a file without times nothing is short
    is_short = (of_launch < SHORT_US) & bool(time_us.any())
    return own[["op", "signature"]].assign(
        module=own["module"].astype(object).fillna(""),
        calls=1,
        launches=launches,
        time_us=time_us,
        short=launches.where(is_short, 0.0),
        short_us=time_us.where(is_short, 0.0),
        of_launch=of_launch,
    )


def _per_call(trace: Trace, signatures: pd.Series[int]) -> pd.Series[float]:
    """How many kernels each call launched, by the mean of its signature's; one operator where none are known."""
    if not trace.kernels:
        return pd.Series(1.0, signatures.index)
    kernels: dict[int, float] = {}
    for record in trace.kernels:
        kernels[record.signature] = kernels.get(record.signature, 0.0) + sum(record.launches)
    counts = signatures.value_counts()
    per_call = {number: count / counts[number] for number, count in kernels.items() if number in counts}
    return signatures.map(per_call).astype(float).fillna(0.0)


def _sums(launches: pd.DataFrame, names: list[str]) -> Iterator[tuple[Any, ...]]:
    """The groups by these columns, those with most launches first."""
    sums = launches.groupby(names, observed=True)[SUMMED].sum().reset_index()
    for row in sums.sort_values("launches", ascending=False, kind="stable").itertuples(index=False, name=None):
        yield (*row[: len(names)], *(float(f"{value:.6g}") for value in row[len(names) :]))


def _curve(launches: pd.DataFrame) -> Iterator[tuple[float, float, float]]:
    """Times of a launch in us, each with the shares of launches and of time that are of shorter ones."""
    timed = launches[launches["of_launch"] > 0].sort_values("of_launch")
    if timed.empty:
        return
    times = timed["of_launch"].to_numpy()
    low, high = np.log10(times[[0, -1]])
    points = [*10 ** np.arange(np.floor(low), high, 1 / POINTS_A_DECADE), times[-1]]
    places = np.searchsorted(times, points, side="right")
    sums = [np.append(0.0, np.cumsum(timed[name].to_numpy())) for name in ("launches", "time_us")]
    for point, place in zip(points, places, strict=True):
        count, time = (float(f"{each[place] / each[-1]:.4g}") for each in sums)
        yield float(f"{point:.4g}"), count, time
