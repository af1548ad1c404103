"""A machine that replays of tests take for quiet: other tests use it too, and would make rows contended."""

from __future__ import annotations

from typing import Any

from opgrip.platform.contention import Contention

MEASURING = (
    "opgrip.replay.timing.rounds",
    "opgrip.replay.timing.concurrent",
    "opgrip.replay.sequences.call_timers",
)
"""Modules that ask for contention while they measure."""


class QuietMachine(Contention):
    """Contention of a machine that nothing else uses."""

    def is_contended(self, *_: Any, **__: Any) -> bool:
        """Return False."""
        return False

    @property
    def is_shared(self) -> bool:
        """False."""
        return False

    @property
    def has_room(self) -> bool:
        """True."""
        return True
