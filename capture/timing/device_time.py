"""How long calls keep an accelerator busy: events around each call, read when they have passed.

Nothing waits for the device in the program's threads. The events are resolved where the calls are written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from opgrip.capture.program.accelerators import current_stream, is_capturing, on_device, with_index
from opgrip.errors import raise_if_from_program

NOT_TIMED = -1
"""Device time of a call that ran on the host alone."""


class Event(Protocol):
    """A mark in a stream of work, such as `torch.Event`."""

    def record(self, stream: Any) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, later: Any, /) -> float: ...


def make_event(device: torch.device) -> Event:
    """An event that tells times."""
    event: Event = torch.Event(device=device, enable_timing=True)
    return event


class DeviceTimer:
    """The events of one thread's calls. They are used again once they were read, each on its first device.

    Whatever goes wrong with an event costs its call's time, and never reaches the program.
    """

    def __init__(self) -> None:
        self._free: dict[torch.device, list[Event]] = {}
        self._open: dict[int, tuple[torch.device, Event, Event]] = {}
        self._stream = 0
        self._streams: dict[int, int] = {}

    def timed(
        self, operator: Callable[..., Any], device: torch.device, started: Callable[[], int]
    ) -> Callable[..., Any]:
        """An operator between two events.

        Parameters
        ----------
        device : which it gives work to; one without an index stands for the thread's current one at each call
        started : the host's start of the call that runs, in ns, by which its time is asked for
        """

        def run(*args: Any, **kwargs: Any) -> Any:
            start = started()
            mark = self._mark(device)
            result = operator(*args, **kwargs)
            if mark is not None:
                used, before = mark
                later = self._mark(used)
                if later is not None:
                    self._open[start] = (used, before, later[1])
                    if self._stream:
                        self._streams[start] = self._stream
            return result

        return run

    def times_ns(self, starts: Sequence[int], may_ask: bool = True) -> list[int]:
        """The device times of the calls that started then, to be asked for once; empty where none has any.

        Parameters
        ----------
        may_ask : whether the device may be asked; else these calls have none
        """
        if not self._open:
            return []
        return [self._read(start, may_ask) for start in starts]

    def forget(self, starts: Sequence[int]) -> None:
        """Let the events of the calls that started then be used again, unread."""
        if not self._open:
            return
        for start in starts:
            self._streams.pop(start, None)
            if (events := self._open.pop(start, None)) is not None:
                self._free.setdefault(events[0], []).extend(events[1:])

    def streams(self, starts: Sequence[int]) -> list[int]:
        """The numbers of the streams of the calls that started then; empty where all are the default one."""
        return [self._streams.pop(start, 0) for start in starts] if self._streams else []

    def _mark(self, device: torch.device) -> tuple[torch.device, Event] | None:
        """A device and an event in the stream that the thread gives it work in; None where there can be none."""
        try:
            # a graph has no times of its own while it is made, and its events cannot be read
            if is_capturing(device.type):
                return None
            device = with_index(device)
            free = self._free.get(device)
            event = free.pop() if free else make_event(device)
            stream = current_stream(device)
            with on_device(device):
                event.record(stream)
            self._stream = getattr(stream, "stream_id", 0)
        except Exception as error:
            raise_if_from_program(error)
            return None
        return device, event

    def _read(self, start: int, may_ask: bool) -> int:
        events = self._open.pop(start, None)
        if events is None or not may_ask:
            return NOT_TIMED
        device, before, after = events
        try:
            with on_device(device):
                after.synchronize()
                time = round(before.elapsed_time(after) * 1e6)
        except Exception as error:
            raise_if_from_program(error)
            return NOT_TIMED
        self._free.setdefault(device, []).extend((before, after))
        return time
