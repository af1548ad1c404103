"""How long calls keep an accelerator busy: events around each call, read when they have passed.

Nothing waits for the device in the program's threads. The events are resolved where the calls are written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

NOT_TIMED = -1
"""Device time of a call that ran on the host alone."""


class Event(Protocol):
    """A mark in a stream of work, such as `torch.cuda.Event`."""

    def record(self) -> None: ...  # noqa: D102

    def synchronize(self) -> None: ...  # noqa: D102

    def elapsed_time(self, later: Any, /) -> float: ...  # noqa: D102


def runs_on_device(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether a call on these tensors gives work to a CUDA device that can be timed now."""
    # asking first whether CUDA was started: a capture does not start it
    if not torch.cuda.is_initialized() or not any(tensor.is_cuda for tensor in tensors):
        return False
    # a CUDA graph has no times of its own while it is made
    return not torch.cuda.is_current_stream_capturing()


def _cuda_event() -> Event:
    return torch.cuda.Event(enable_timing=True)


class DeviceTimer:
    """The events of one thread's calls. They are used again once they were read.

    Parameters
    ----------
    make_event : makes an event
    """

    def __init__(self, make_event: Callable[[], Event] = _cuda_event) -> None:
        self._make_event = make_event
        self._free: list[Event] = []
        self._open: dict[int, tuple[Event, Event]] = {}

    def timed(self, operator: Callable[..., Any], started: Callable[[], int]) -> Callable[..., Any]:
        """An operator between two events.

        Parameters
        ----------
        started : the host's start of the call that runs, in ns, by which its time is asked for
        """

        def run(*args: Any, **kwargs: Any) -> Any:
            before, after = self._event(), self._event()
            start = started()
            before.record()
            result = operator(*args, **kwargs)
            after.record()
            self._open[start] = (before, after)
            return result

        return run

    def times_ns(self, starts: Sequence[int]) -> list[int]:
        """The device times of the calls that started then, to be asked for once; empty where none has any."""
        if not self._open:
            return []
        return [self._read(start) for start in starts]

    def _event(self) -> Event:
        return self._free.pop() if self._free else self._make_event()

    def _read(self, start: int) -> int:
        events = self._open.pop(start, None)
        if events is None:
            return NOT_TIMED
        before, after = events
        after.synchronize()
        time = round(before.elapsed_time(after) * 1e6)
        self._free += events
        return time
