"""Machine that replays in tests treat as idle; otherwise concurrent tests would make their rows contended."""

from typing import Any

from opgrip.platform.contention import Contention

MEASURING = "opgrip.replay.timing.disturbances"  # module that queries contention while replays are timed


class QuietMachine(Contention):
    """Replacement of `Contention` that reports that no other process uses the processors."""

    def is_contended(self, *_: Any, **__: Any) -> bool:
        return False

    @property
    def is_shared(self) -> bool:
        return False

    @property
    def has_room(self) -> bool:
        return True
