"""Cases spread over equal devices: which windows of them go to which, and the rows of all as they come."""

from __future__ import annotations

import select
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from math import ceil

from opgrip.replay.cases.cases import Case
from opgrip.replay.results.results import Result
from opgrip.replay.run.measure import CASES, windows
from opgrip.replay.workers.connection import Connection
from opgrip.replay.workers.job import Loaded
from opgrip.replay.workers.worker_processes import POLL_S

PARTS = 4
"""Windows of a device, where its share of the cases is small: fewer would leave one idle while another has its last."""

Lane = Iterator[list[Result] | None]
"""The rows of the cases that a device serves, case by case; None where the next are to be waited for."""


class Windows:
    """Windows of cases, dealt to devices in turn; a device that has done its own takes another's last.

    Parameters
    ----------
    done : numbers of cases that are left out
    """

    def __init__(self, loaded: Loaded, done: Collection[int]) -> None:
        devices = loaded.devices
        cases = sorted((case for case in loaded.cases if case.number not in done), key=loaded.surroundings.first)
        most = CASES if len(devices) == 1 else min(CASES, ceil(len(cases) / (PARTS * len(devices))))
        self._windows: dict[str, deque[list[Case]]] = {device: deque() for device in devices}
        for place, window in enumerate(windows(cases, loaded.settings, most)):
            self._windows[devices[place % len(devices)]].append(window)

    def dealt_to(self, device: str) -> list[Case]:
        """The cases that a device begins with."""
        return [case for window in self._windows[device] for case in window]

    def take(self, device: str) -> Iterator[list[Case]]:
        """Windows for a device until there are none; each is taken when it is asked for."""
        own = self._windows[device]
        while any(self._windows.values()):
            yield own.popleft() if own else max(self._windows.values(), key=len).pop()


def interleaved(lanes: Mapping[Connection, Lane]) -> Iterator[list[Result]]:
    """The rows of all lanes as they come.

    Parameters
    ----------
    lanes : by what they wait for
    """
    remaining = dict(lanes)
    while remaining:
        for process, lane in list(remaining.items()):
            for rows in lane:
                if rows is None:
                    break
                yield rows
            else:
                del remaining[process]
        if remaining:
            select.select(list(remaining), [], [], POLL_S)
