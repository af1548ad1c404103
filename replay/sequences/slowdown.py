"""Whether others had the processors during a pass over a sequence: asked between its calls, outside of their clocks."""

from __future__ import annotations

from time import perf_counter_ns

from opgrip.replay.timing.clock import Pace
from opgrip.traces.contention import Contention

CHECK_NS = 10_000_000
"""Time after which it is asked again, which takes some ten microseconds and a few lines of the caches."""
SHARE = 0.05
"""Of a pass's time, what was disturbed before the pass counts as slowed: one short interruption is one call's."""


class Slowdown:
    """Tells of a pass whether the processor was slowed down, or taken from a thread, for a part of it that matters."""

    def __init__(self) -> None:
        self._pace, self._contention = Pace(), Contention()
        self._began_ns = self._checked_ns = self._slowed_ns = 0

    def begin(self) -> None:
        """Begin a pass."""
        # what was before is not the pass's
        self._is_slowed_now()
        self._slowed_ns = 0
        self._began_ns = self._checked_ns = perf_counter_ns()

    def check(self) -> None:
        """Ask once more, if enough time has passed."""
        if perf_counter_ns() - self._checked_ns >= CHECK_NS:
            self._check()

    def was_slowed(self) -> bool:
        """Whether the pass that ends now was slowed."""
        self._check()
        return self._slowed_ns > SHARE * (self._checked_ns - self._began_ns)

    def close(self) -> None:
        """Let go of files."""
        self._contention.close()

    def _check(self) -> None:
        is_slowed = self._is_slowed_now()
        now = perf_counter_ns()
        if is_slowed:
            self._slowed_ns += now - self._checked_ns
        self._checked_ns = now

    def _is_slowed_now(self) -> bool:
        # both are asked, since each tells of what passed since it was asked last
        return any([self._pace.is_slowed(), self._contention.is_contended()])
