"""Algorithm and bus bandwidth of collectives, as nccl-tests define them.

Algorithm bandwidth is size over time; bus bandwidth is that times a factor, by which collectives of any number of
ranks compare with what a link can carry. The size is the message of one rank for all-reduce, broadcast, reduce and
messages from rank to rank, and that of all ranks together for the others.

Source: NVIDIA nccl-tests, doc/PERFORMANCE.md; gather and scatter as its `gather_perf` and `scatter_perf`.
"""

from __future__ import annotations

from collections.abc import Callable

from opgrip.traces.analysis.ranks.operators import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BROADCAST,
    GATHER,
    MESSAGES,
    REDUCE,
    REDUCE_SCATTER,
    SCATTER,
)

SEND_RECV = "send_recv"
"""The two sides of a message from rank to rank, in a table of collectives."""


def _others(ranks: int) -> float:
    return (ranks - 1) / ranks


_FACTORS: dict[str, Callable[[int], float]] = {
    ALL_REDUCE: lambda ranks: 2 * _others(ranks),
    REDUCE_SCATTER: _others,
    ALL_GATHER: _others,
    ALL_TO_ALL: _others,
    GATHER: _others,
    SCATTER: _others,
    BROADCAST: lambda ranks: 1.0,
    REDUCE: lambda ranks: 1.0,
    SEND_RECV: lambda ranks: 1.0,
}
WHOLE = frozenset({REDUCE_SCATTER, ALL_GATHER, ALL_TO_ALL, GATHER, SCATTER})
"""Kinds whose size is that of all members' parts together."""


def bus_factor(kind: str, ranks: int) -> float:
    """What algorithm bandwidth is multiplied by; 0 for a barrier, which moves nothing."""
    factor = _FACTORS.get(SEND_RECV if kind in MESSAGES else kind)
    return 0.0 if factor is None else factor(ranks)


def size_of(kind: str, member_bytes: int, ranks: int) -> int:
    """The size that bandwidths refer to in bytes.

    Parameters
    ----------
    member_bytes : of the part that each member gives or gets; of an all-to-all, of all that this rank sends
    """
    return member_bytes * ranks if kind in WHOLE - {ALL_TO_ALL} else member_bytes
