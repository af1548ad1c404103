"""Schedule of the steps to record, and the switch that turns a capture's hooks on and off."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, fields
from numbers import Integral
from threading import get_ident
from typing import Any

from opgrip.capture.recording.recorder import Recorder
from opgrip.capture.torch_compat.compiler_private import OrderlyMode
from opgrip.platform import perf_counter_ns


class Watching:
    def __init__(self, recorder: Recorder, watches: Sequence[AbstractContextManager[Any]], with_mode: bool) -> None:
        self._watches = watches
        self._recorder = recorder
        self._with_mode = with_mode
        self._hooks = ExitStack()
        self._is_on = False
        self._thread = 0

    def resume(self) -> None:
        self._recorder.set_idle(False)
        if self._is_on:
            return
        self._is_on, self._thread = True, get_ident()
        began = perf_counter_ns()
        with ExitStack() as hooks:
            for watch in self._watches:
                hooks.enter_context(watch)
            if self._with_mode:
                hooks.enter_context(self._recorder.threads.here())
            self._hooks = hooks.pop_all()
        self._recorder.observations.spent_ns += perf_counter_ns() - began

    def pause(self) -> None:
        if self._is_on:
            self._recorder.set_idle(True)
            if not self._with_mode or (get_ident() == self._thread and OrderlyMode.can_leave()):
                # only its own thread can remove a mode, and no signal handler within a call; until then, it is idle
                self._is_on = False
                began = perf_counter_ns()
                self._hooks.close()
                self._recorder.observations.spent_ns += perf_counter_ns() - began


@dataclass(frozen=True, slots=True)
class Schedule:
    """The steps that a capture records: `skip` steps are skipped, then cycles of `wait`, `warmup` and `active` steps
    follow; the active steps are recorded.

    repeat : number of cycles, or 0 to repeat until the program ends
    warmup : number of steps per cycle that run under the capture but are not recorded
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
                raise ValueError(f"{field.name}={value!r} is not an integer number of steps")
        if self.active < 1 or min(self.wait, self.skip, self.repeat, self.warmup) < 0:
            raise ValueError("a schedule needs at least 1 active step, and no number of steps may be negative")

    def records(self, step: int) -> bool:
        return self._is_within(step) and self._place(step) >= self.wait + self.warmup

    def learns(self, step: int) -> bool:
        """Return True if the step with this index, from 0, runs under the capture but is not recorded."""
        return self._is_within(step) and self.wait <= self._place(step) < self.wait + self.warmup

    def is_over(self, step: int) -> bool:
        return bool(self.repeat) and step - self.skip >= self.repeat * self._cycle

    def _is_within(self, step: int) -> bool:
        return step >= self.skip and not self.is_over(step)

    def _place(self, step: int) -> int:
        return (step - self.skip) % self._cycle

    @property
    def _cycle(self) -> int:
        return self.wait + self.warmup + self.active


ALWAYS = Schedule()  # schedule that records every step from the start
