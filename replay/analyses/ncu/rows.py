"""Joins the kernels of a report to the rows of a replay."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from opgrip.replay.analyses.ncu.metrics import DURATION, SHARES, SUMS
from opgrip.replay.analyses.ncu.report import Kernel
from opgrip.replay.analyses.profiling.rows import Key, key_of
from opgrip.replay.results.columns import Columns, column
from opgrip.replay.results.results import Result
from opgrip.replay.timing.ranges import row_name


@dataclass(frozen=True, slots=True)
class NcuColumns(Columns):
    """What Nsight Compute saw of a row's kernels."""

    ncu_kernels: str | None = column("names of a run's kernels, and how many of each")
    ncu_launches: float | None = column("kernels of a run")
    ncu_us: float | None = column("their time in a run", "us", "ncu us")
    ncu_dram_bytes: int | None = column("of a run, between the GPU and its memory", "bytes")
    ncu_l2_bytes: int | None = column("of a run, through its L2 cache", "bytes")
    ncu_dram_share: float | None = column("of what the memory could do at most in that time", "1", "dram")
    ncu_l2_share: float | None = column("of what the L2 cache could do", "1")
    ncu_sm_share: float | None = column("of what the multiprocessors could do", "1", "sm")
    ncu_tensor_share: float | None = column("of what the tensor cores could do", "1", "tensor")
    ncu_occupancy: float | None = column("warps that were active, of those that there is room for", "1", "occupied")
    ncu_metrics: str | None = column("further ones that were asked for, as `name=value; ...`")


def joined(rows: Sequence[Result], kernels: Sequence[Kernel]) -> tuple[dict[Key, list[Kernel]], int]:
    """The kernels of each row; and how many belong to none."""
    keys = {row_name(row.case, row.op, key_of(row)[1]): key_of(row) for row in rows}
    # the longest first: one name can begin another
    names = "|".join(re.escape(name) for name in sorted(keys, key=len, reverse=True))
    named = re.compile(rf"(?<!\w)(?:{names})(?![\w.])")
    kernels_by_row: dict[Key, list[Kernel]] = {}
    outside = 0
    for kernel in kernels:
        match = named.search(kernel.ranges)
        if match is None:
            outside += 1
        else:
            kernels_by_row.setdefault(keys[match.group()], []).append(kernel)
    return kernels_by_row, outside


def columns_of(kernels: Sequence[Kernel], runs: int, requested_metrics: Sequence[str]) -> NcuColumns:
    """What a row gets of its kernels, for one run.

    Parameters
    ----------
    runs : that they are of
    requested_metrics : metrics that were asked for
    """
    names = Counter(kernel.name for kernel in kernels)
    sums = {field: [_sum(kernels, name) for name in metrics] for field, metrics in SUMS.items()}
    shares: dict[str, Any] = {field: _mean(kernels, name) for field, name in SHARES.items()}
    own = {DURATION, *SHARES.values(), *(name for metrics in SUMS.values() for name in metrics)}
    others = {name: _other(kernels, runs, name) for name in requested_metrics if name not in own}
    duration = _sum(kernels, DURATION)
    return NcuColumns(
        ncu_kernels="; ".join(f"{name} x{count / runs:g}" for name, count in names.most_common()),
        ncu_launches=len(kernels) / runs,
        ncu_us=None if duration is None else duration / runs / 1e3,
        **{field: None if None in parts else round(sum(filter(None, parts)) / runs) for field, parts in sums.items()},
        **{field: None if share is None else share / 100 for field, share in shares.items()},
        ncu_metrics="; ".join(f"{name}={value:g}" for name, value in others.items() if value is not None) or None,
    )


def _sum(kernels: Sequence[Kernel], name: str) -> float | None:
    values = [kernel.metrics[name] for kernel in kernels if name in kernel.metrics]
    return sum(values) if values else None


def _mean(kernels: Sequence[Kernel], name: str) -> float | None:
    """The mean over the time that the kernels took."""
    measured = [kernel for kernel in kernels if name in kernel.metrics]
    time = sum(map(_time, measured))
    return sum(kernel.metrics[name] * _time(kernel) for kernel in measured) / time if time else None


def _time(kernel: Kernel) -> float:
    return kernel.metrics.get(DURATION, 1.0)


def _other(kernels: Sequence[Kernel], runs: int, name: str) -> float | None:
    if name.endswith(".sum"):
        total = _sum(kernels, name)
        return None if total is None else total / runs
    return _mean(kernels, name)
