"""Reads the traces of ranks for what their collectives tell of their clocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from opgrip.traces.analysis.ranks.clocks import Clock, align
from opgrip.traces.analysis.ranks.meetings import match
from opgrip.traces.analysis.ranks.scan import UNKNOWN, Events, Scan, SignatureKinds
from opgrip.traces.codec.call_blocks import CallBlock
from opgrip.traces.codec.json_values import LATEST_NS
from opgrip.traces.io.reader import TraceReader
from opgrip.traces.schema.records import Signature

MOST = 1 << 12
"""Collectives of a group that clocks are compared by."""


def rank_of(header: Mapping[str, Any]) -> int | None:
    """The rank of a process by its header; None where it had none, and for one that a rank forked."""
    rank = header.get("rank")
    is_rank = type(rank) is int and 0 <= rank < 1 << 31 and "parent_pid" not in header
    return rank if is_rank else None


def is_ambiguous(ranks: Sequence[int | None]) -> bool:
    """Whether two processes are of one rank: their collectives are those of several programs."""
    numbers = [rank for rank in ranks if rank is not None]
    return len(set(numbers)) < len(numbers)


def measure_clocks(
    paths: Sequence[Path], headers: Sequence[Mapping[str, Any]], shifts: Sequence[int], unbounded: bool = False
) -> list[Clock]:
    """The clock of each process, beyond what its shift puts right, in one pass over each trace.

    Parameters
    ----------
    shifts : of each process, what is added to its times by the start of its capture, in ns
    """
    events: dict[int, Events] = {}
    kinds = [SignatureKinds() for _ in paths]
    ranks = [rank_of(header) for header in headers]
    if is_ambiguous(ranks):
        return [Clock() for _ in paths]
    for process, (path, shift_ns) in enumerate(zip(paths, shifts, strict=True)):
        if ranks[process] is None or abs(shift_ns) > LATEST_NS:
            continue
        scan = Scan(kinds[process])
        for record in TraceReader(path, unbounded).columns():
            match_record(record, kinds[process], scan)
        events[process] = thinned(shifted(scan.events(), shift_ns), kinds[process])
    collectives = {process: kinds[process].collectives for process in events}
    clocks = align(match(events, collectives, ranks), len(paths))
    # what a rank forked runs by the clock of that rank
    offsets = {rank: clock.offset_ns for rank, clock in zip(ranks, clocks, strict=True) if rank is not None}
    for process, header in enumerate(headers):
        if ranks[process] is None and type(header.get("rank")) is int:
            clocks[process] = Clock(offsets.get(header["rank"], 0))
    return clocks


def thinned(events: Events, kinds: SignatureKinds, most: int = MOST) -> Events:
    """At most so many collectives of each group: every second one, or fourth and so on, so that ranks keep the same."""
    groups: dict[str, int] = {}
    numbers = [groups.setdefault(kinds.collectives[number].group, len(groups)) for number in events.signature.tolist()]
    counts = np.bincount(numbers, minlength=1)[numbers] if numbers else np.empty(0, dtype=np.int64)
    # the least power of two by which few enough remain
    stride = 1 << np.ceil(np.log2(np.maximum(counts / most, 1))).astype(np.int64)
    chosen = events.ordinal % stride == 0
    return Events(**{name: getattr(events, name)[chosen] for name in events.__slots__})


def match_record(record: object, kinds: SignatureKinds, scan: Scan) -> None:
    """Give a record of one rank's trace to a scan."""
    if isinstance(record, Signature):
        kinds.add(record)
    elif isinstance(record, CallBlock):
        scan.add(record)


def shifted(events: Events, shift_ns: int) -> Events:
    """The same on another clock."""
    names = ("start_ns", "launched_ns", "wait_ns", "end_ns")
    moved = {name: getattr(events, name) + shift_ns for name in names}
    for name in ("wait_ns", "end_ns"):
        moved[name][getattr(events, name) == UNKNOWN] = UNKNOWN
    return replace(events, **moved)
