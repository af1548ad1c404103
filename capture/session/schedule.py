"""Which steps of a long program are recorded, and how what watches the program is switched on and off."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, fields
from numbers import Integral
from time import perf_counter_ns
from typing import Any

from opgrip.capture.recording.recorder import Recorder


class Watching:
    """Whether a capture's watches, and the mode of the thread that put them on, are on.

    Parameters
    ----------
    watches : in the order in which they are put on
    with_mode : records the thread that puts them on; else threads are recorded by others
    """

    def __init__(
        self, recorder: Recorder, watches: Sequence[AbstractContextManager[Any]], with_mode: bool = True
    ) -> None:
        self.watches = watches
        self._recorder = recorder
        self._with_mode = with_mode
        self._hooks = ExitStack()
        self._is_on = False
        self._thread = 0

    def resume(self) -> None:
        """Record calls from now on."""
        self._recorder.set_idle(False)
        if self._is_on:
            return
        self._is_on, self._thread = True, threading.get_ident()
        began = perf_counter_ns()
        with ExitStack() as hooks:
            for watch in self.watches:
                hooks.enter_context(watch)
            if self._with_mode:
                hooks.enter_context(self._recorder.threads.here())
            self._hooks = hooks.pop_all()
        self._recorder.observations.spent_ns += perf_counter_ns() - began

    def pause(self) -> None:
        """Let calls pass."""
        if self._is_on:
            self._recorder.set_idle(True)
            if not self._with_mode or threading.get_ident() == self._thread:
                # a mode can be taken off by its own thread alone; elsewhere, all of it is idle from now on
                self._is_on = False
                began = perf_counter_ns()
                self._hooks.close()
                self._recorder.observations.spent_ns += perf_counter_ns() - began


@dataclass(frozen=True, slots=True)
class Schedule:
    """Record `active` steps after each `wait` and `warmup`, `repeat` times, the first time after `skip` steps more.

    As `torch.profiler.schedule` counts: the first step runs from the start of the capture to the first
    `Capture.step()`.

    Parameters
    ----------
    warmup : steps that run under the watch and whose calls are thrown away: in them the capture meets what is new to
        it, looks at values and prepares, so that the steps after them are timed undisturbed
    repeat : 0 for as often as the program goes on
    """

    active: int = 1
    wait: int = 0
    skip: int = 0
    repeat: int = 0
    warmup: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, Integral):
                raise ValueError(f"a schedule has a whole number of steps, and {field.name}={value!r} is none")
        if self.active < 1 or min(self.wait, self.skip, self.repeat, self.warmup) < 0:
            raise ValueError("a schedule has at least 1 active step, and no negative number of others")

    def records(self, step: int) -> bool:
        """Whether a step is recorded.

        Parameters
        ----------
        step : from 0
        """
        return self._is_within(step) and self._place(step) >= self.wait + self.warmup

    def learns(self, step: int) -> bool:
        """Whether a step runs under the watch, and is not recorded."""
        return self._is_within(step) and self.wait <= self._place(step) < self.wait + self.warmup

    def is_over(self, step: int) -> bool:
        """Whether neither this step nor a later one is recorded."""
        return bool(self.repeat) and step - self.skip >= self.repeat * self._cycle

    def _is_within(self, step: int) -> bool:
        return step >= self.skip and not self.is_over(step)

    def _place(self, step: int) -> int:
        return (step - self.skip) % self._cycle

    @property
    def _cycle(self) -> int:
        return self.wait + self.warmup + self.active


ALWAYS = Schedule()
"""Every step, from the start on."""
