"""Why the times of a trace are doubtful, in sentences for its reader."""

from __future__ import annotations

from collections.abc import Iterator

CONTENDED = 0.2
"""Share of a capture with other processes on the processors from which on its times are doubtful."""
SLOW = 0.05
"""Share of the calls' time that slow memory took from which on they are."""


def time_doubts(contended: float, slow_memory: float) -> Iterator[str]:
    """Yield what made the times of a capture doubtful, and what to do about it.

    Parameters
    ----------
    contended : share of the capture in which other processes used the processors that the program waited for
    slow_memory : share of the calls' time that slow page faults took
    """
    if contended >= CONTENDED:
        yield (
            f"the machine was busy in {contended:.0%} of the recorded time: times and shares are doubtful; capture "
            "again when nothing else runs"
        )
    if slow_memory >= SLOW:
        yield (
            f"the machine was slow to provide memory, which took {slow_memory:.0%} of the calls' time: these calls are "
            "marked and count without it, by an estimate; a second capture, or more warm-up, is closer"
        )
