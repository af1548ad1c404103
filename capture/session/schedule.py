"""Which steps of a long program are recorded."""

from __future__ import annotations

from dataclasses import dataclass, fields
from numbers import Integral


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
