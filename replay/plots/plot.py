"""What a kind of picture is, and what is asked of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from opgrip.cli.plugins import Registry

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from opgrip.replay.results.results import Result


class Run(Protocol):
    """The rows of a replay and where they come from, as `Results` has them."""

    @property
    def rows(self) -> Sequence[Result]:
        """One a case and way to run it."""

    @property
    def header(self) -> Mapping[str, Any]:
        """The trace, the versions and the device."""


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be drawn.

    Attributes
    ----------
    runs : results by name, in their order
    title : of the picture; empty for none
    by : what cases are grouped by, such as `family` or `op`; None for the kind's own choice
    over : the column along the x axis; None for the kind's own choice
    """

    runs: Mapping[str, Run]
    title: str = ""
    by: str | None = None
    over: str | None = None


Draw = Callable[[Request], "Figure"]


@dataclass(frozen=True, slots=True)
class Plot:
    """A kind of picture.

    Attributes
    ----------
    summary : for the help of the command
    draw : makes it; raises `UserError` where the results have nothing to be drawn
    by : the values of `--by` that it takes, its own choice first
    over : the values of `--over` that it takes
    least, most : how many results it takes; None for any number
    """

    summary: str
    draw: Draw
    by: tuple[str, ...] = ()
    over: tuple[str, ...] = ()
    least: int = 1
    most: int | None = None


plots: Registry[Plot] = Registry("opgrip.replay.plots", "opgrip.plots")
"""Kinds of pictures by name."""
