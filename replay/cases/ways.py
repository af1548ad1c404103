"""The ways in which a case is run, each a row of the results."""

from __future__ import annotations

from dataclasses import dataclass

from opgrip.replay.arguments.values import RECORDED

EAGER = "eager"
FORWARD, BACKWARD = "forward", "backward"


@dataclass(frozen=True, slots=True)
class Point:
    """What a case is run with.

    Attributes
    ----------
    threads : of an operator; None for as many as the program had
    batch : times the recorded batch
    streams : cases that run at once, on threads or on streams of a device
    """

    threads: int | None = None
    batch: int = 1
    streams: int = 1


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run a case.

    Attributes
    ----------
    number : among all ways of the case
    values : how they are drawn
    direction : `forward`, or `backward` for the gradients of a call
    mode : its name, with what follows the colon
    """

    number: int
    values: str
    direction: str
    mode: str
    point: Point = Point()

    @property
    def label(self) -> str:
        """The words that tell it from the case's other ways: `compile backward random`, `eager 2 threads`."""
        usual = (FORWARD, RECORDED)
        words = [self.mode, *(word for word in (self.direction, self.values) if word not in usual)]
        if self.point.threads is not None:
            words.append(f"{self.point.threads} threads")
        if self.point.batch != 1:
            words.append(f"batch x{self.point.batch}")
        if self.point.streams != 1:
            words.append(f"{self.point.streams} streams")
        return " ".join(words)
