"""Threads that run functions at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from threading import Barrier, BrokenBarrierError
from typing import Any, TypeAlias, TypeVar

import torch

from opgrip.replay.operators.contexts import restored
from opgrip.replay.operators.devices import check_use, synchronizer
from opgrip.replay.timing.rounds import Group

T = TypeVar("T")

Work: TypeAlias = Callable[[Callable[[], None]], T]
"""A function that is told how to wait for what it started on the device."""


class Crew:
    """Threads that run functions at once, each under a group's settings and on a stream of its own."""

    def __init__(self, group: Group, count: int, device: str) -> None:
        self._group = group
        self.device = device
        self.synchronize = synchronizer(device)
        self._threads = ThreadPoolExecutor(count)
        self._kind = torch.device(device).type
        streams = 0 if self._kind == "cpu" else count
        self._streams = [getattr(torch, self._kind).Stream(device) for _ in range(streams)]

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *error: object) -> None:
        self._threads.shutdown()

    def at_once(self, functions: Sequence[Work[T]]) -> list[T]:
        """What the functions give, which are told how to wait for their own work; no more than there are threads."""
        # a thread that waits here takes no other function, so each has a thread of its own
        barrier = Barrier(len(functions))
        self.synchronize()
        running = [self._threads.submit(self._run, place, one, barrier) for place, one in enumerate(functions)]
        try:
            return [future.result() for future in running]
        except BaseException as error:
            barrier.abort()
            # where the device is lost, leaving the stream of a thread raised too
            check_use(self.device, error)
            raise

    def _run(self, place: int, function: Work[T], barrier: Barrier) -> T:
        stream: AbstractContextManager[Any] = nullcontext()
        finish = self.synchronize
        if self._streams:
            stream = getattr(torch, self._kind).stream(self._streams[place])
            finish = self._streams[place].synchronize
        try:
            # gradient and inference mode are each thread's own; what holds for the process is as it should be already
            with restored(self._group.settings), torch.set_grad_enabled(self._group.grad), stream:
                barrier.wait()
                return function(finish)
        except BrokenBarrierError:
            raise
        except BaseException:
            barrier.abort()
            raise
