"""Which steps of a long program are recorded."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Schedule:
    """Record `active` steps after each `wait`, `repeat` times, the first time after `skip` steps more.

    As `torch.profiler.schedule` counts: the first step runs from the start of the capture to the first
    `Capture.step()`.

    Parameters
    ----------
    repeat : 0 for as often as the program goes on
    """

    active: int = 1
    wait: int = 0
    skip: int = 0
    repeat: int = 0

    def __post_init__(self) -> None:
        if self.active < 1 or min(self.wait, self.skip, self.repeat) < 0:
            raise ValueError("a schedule has at least 1 active step, and no negative number of others")

    def records(self, step: int) -> bool:
        """Whether a step is recorded.

        Parameters
        ----------
        step : from 0
        """
        if step < self.skip or self.is_over(step):
            return False
        return (step - self.skip) % (self.wait + self.active) >= self.wait

    def is_over(self, step: int) -> bool:
        """Whether neither this step nor a later one is recorded."""
        return bool(self.repeat) and step - self.skip >= self.repeat * (self.wait + self.active)
