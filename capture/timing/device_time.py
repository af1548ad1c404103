"""Device time of calls, measured with an event before and an event after each call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from opgrip.capture.program.accelerators import (
    DeviceQueries,
    current_stream,
    on_device,
    queries_of,
    record_on,
    with_index,
)
from opgrip.errors import raise_if_from_program

NOT_TIMED = -1  # device time of a call that ran only on the host


def make_event(device: torch.device) -> Any:
    return torch.Event(device=device, enable_timing=True)


class DeviceTimer:
    """Measures device times of one thread's calls with events before and after them."""

    def __init__(self) -> None:
        self._free: dict[torch.device, list[Any]] = {}
        self._open: dict[int, tuple[torch.device, Any, Any]] = {}
        self._stream = 0
        self._streams: dict[int, int] = {}
        self._stream_by_handle: dict[tuple[torch.device, int], int] = {}

    def timed(
        self, operator: Callable[..., Any], device: torch.device, started: Callable[[], int]
    ) -> Callable[..., Any]:
        """Return a wrapper that runs an operator, and measures its calls' device times with events.

        started : returns the start of the running call on the host in ns, which identifies the call
        """
        queries = queries_of(device.type)
        begin = self._begin

        def run(*args: Any, **kwargs: Any) -> Any:
            start = started()
            used = begin(device, queries)
            result = operator(*args, **kwargs)
            if used is not None:
                self._end(start, *used)
            return result

        return run

    def with_stream(
        self, operator: Callable[..., Any], device: torch.device, started: Callable[[], int]
    ) -> Callable[..., Any]:
        queries = queries_of(device.type)

        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                stream = self._current(with_index(device), queries)
                if stream:
                    self._streams[started()] = stream
            except Exception as error:
                raise_if_from_program(error)
            return operator(*args, **kwargs)

        return run

    def times_ns(self, starts: Sequence[int], may_ask: bool = True) -> list[int]:
        """Remove and return the device times in ns of the calls with these starts."""
        if not self._open:
            return []
        times, by_device = [NOT_TIMED] * len(starts), dict[torch.device, list[tuple[int, Any, Any]]]()
        for place, start in enumerate(starts):
            if (events := self._open.pop(start, None)) is not None and may_ask:
                by_device.setdefault(events[0], []).append((place, *events[1:]))
        for device, timed in by_device.items():
            self._read_all(device, timed, times)
        return times

    def forget(self, starts: Sequence[int]) -> None:
        if not self._open and not self._streams:
            return
        for start in starts:
            self._streams.pop(start, None)
            if (events := self._open.pop(start, None)) is not None:
                self._free.setdefault(events[0], []).extend(events[1:])

    def streams(self, starts: Sequence[int]) -> list[int]:
        """Remove and return torch's stream numbers of the calls with these starts."""
        return [self._streams.pop(start, 0) for start in starts] if self._streams else []

    def _begin(self, device: torch.device, queries: DeviceQueries) -> tuple[torch.device, Any, bool] | None:
        try:
            # events in a graph cannot be read, and recording the graph has no device times
            if queries.is_capturing():
                return None
            current = queries.current_device()
            index: int | None = device.index
            if index is None:
                device = torch.device(device.type, current)
            is_current = device.index == current
            event = self._mark(device, is_current)
            self._stream = self._current(device, queries)
        except Exception as error:
            raise_if_from_program(error)
            return None
        return device, event, is_current

    def _current(self, device: torch.device, queries: DeviceQueries) -> int:
        key = device, queries.stream_handle(device.index)
        stream = self._stream_by_handle.get(key)
        if stream is None:
            stream = self._stream_by_handle[key] = getattr(current_stream(device), "stream_id", 0)
        return stream

    def _end(self, start: int, device: torch.device, before: Any, is_current: bool) -> None:
        try:
            self._open[start] = device, before, self._mark(device, is_current)
            if self._stream:
                self._streams[start] = self._stream
        except Exception as error:
            raise_if_from_program(error)

    def _mark(self, device: torch.device, is_current: bool) -> Any:
        free = self._free.get(device)
        event = free.pop() if free else make_event(device)
        if not is_current:
            return record_on(device, event)
        # without a stream object, which takes longer to make than the event takes to be recorded
        event.record()
        return event

    def _read_all(self, device: torch.device, timed: Sequence[tuple[int, Any, Any]], times: list[int]) -> None:
        try:
            # once for all, because it costs as much as reading an event
            with on_device(device):
                for place, before, after in timed:
                    times[place] = self._read(device, before, after)
        except Exception as error:
            raise_if_from_program(error)

    def _read(self, device: torch.device, before: Any, after: Any) -> int:
        try:
            after.synchronize()
            time: int = round(before.elapsed_time(after) * 1e6)
        except Exception as error:
            raise_if_from_program(error)
            return NOT_TIMED
        self._free.setdefault(device, []).extend((before, after))
        return time
