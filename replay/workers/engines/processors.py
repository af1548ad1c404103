"""Processors that one worker of this machine has to itself."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep

from opgrip.errors import UserError

WAIT_S, POLL_S = 60.0, 0.2
"""For processors that another worker leaves: how long, and how often they are tried."""


class Processors:
    """Processors that this process and those that it starts are bound to, and no other worker of this user.

    Each is a locked file, which the system unlocks when this process has ended, in whatever way.

    Parameters
    ----------
    count : how many; none are taken for 0, and the process may use what it could before

    Attributes
    ----------
    numbers : theirs, ascending

    Raises
    ------
    UserError : where other workers have them
    """

    def __init__(self, count: int, wait_s: float = WAIT_S) -> None:
        self._files: list[int] = []
        self.numbers: Sequence[int] = ()
        if not count:
            return
        usable = sorted(os.sched_getaffinity(0))
        if count > len(usable):
            raise UserError(f"there are {len(usable)} processors here, and not {count}", "give fewer to --processors")
        folder = Path(tempfile.gettempdir()) / f"opgrip-processors-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        end = monotonic() + wait_s
        while not self._take(folder, usable, count):
            if monotonic() > end:
                raise UserError(f"other workers have so many processors that {count} are not free", "give fewer")
            sleep(POLL_S)
        os.sched_setaffinity(0, self.numbers)

    def close(self) -> None:
        """Leave them to others."""
        for file in self._files:
            os.close(file)
        self._files.clear()

    def _take(self, folder: Path, usable: Sequence[int], count: int) -> bool:
        """Take so many, or none."""
        numbers = []
        for number in usable:
            file = os.open(folder / str(number), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            with suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._files.append(file)
                numbers.append(number)
                if len(numbers) == count:
                    self.numbers = numbers
                    return True
                continue
            os.close(file)
        self.close()
        return False
