"""The ways in which a case is run, each a row of the results."""

from __future__ import annotations

from dataclasses import dataclass

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
