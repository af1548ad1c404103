"""Progress of a command on stderr: a live display on a terminal, plain lines elsewhere, a notice while torch loads."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import Protocol, TypeAlias

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from opgrip.cli.terminal import console_for
from opgrip.errors import shortened

CLEAR = "\r\x1b[K"


@contextmanager
def loading(prog: str) -> Iterator[None]:
    """On a terminal, a line that says so while the block runs, and then goes; elsewhere nothing."""
    if "torch" in sys.modules or not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield
        return
    sys.stderr.write(f"{prog}: loading torch ...")
    sys.stderr.flush()
    try:
        yield
    finally:
        sys.stderr.write(CLEAR)
        sys.stderr.flush()


REDRAW_S = 0.1
TIME_WIDTH = len(" 10:00:00")
"""Columns of a terminal that a time takes."""
LEAST_TEXT, LEAST_BAR, MOST_BAR = 12, 8, 40
"""Columns below which a text or a bar is left out, and those that a bar fills."""
MOST_STEPS = 9999
"""Of a part of a task, as far as room is kept for their number."""
LARGE_BYTES = 20_000_000
"""Of a file that takes seconds to read."""


class Advance(Protocol):
    """Is called when a step is done; `now` tells how things stand, where there is room for it."""

    def __call__(self, now: str = "") -> None:
        """Tell that it is done."""


Tell: TypeAlias = Callable[[str, int, int], None]
"""Is told what part of a task is done, and how many of how many steps of it."""


def tell_nobody(part: str, done: int, total: int) -> None:
    """Tell nobody."""


class Reporter:
    """Tells what a command does.

    Parameters
    ----------
    prog : the command's name, which plain lines begin with
    """

    def __init__(self, prog: str) -> None:
        self.prog = prog
        self.console = console_for(stderr=True)

    @property
    def _can_redraw(self) -> bool:
        """Whether what is shown can be replaced; in Jupyter its widgets do that, without which rich warns each time."""
        return self.console.is_terminal or (self.console.is_jupyter and has_widgets())

    def say(self, text: str) -> None:
        """One line that stays."""
        self.console.print(f"{self.prog}: {text}", markup=False, soft_wrap=True)

    def begin(self, text: str) -> None:
        """Tell of a task where its progress cannot be shown."""
        self.say(text)

    @contextmanager
    def doing(self, text: str, total: int | None = None, measures: bool = True) -> Iterator[Advance]:
        """A task that runs while the block does; on a terminal it is shown with how far it is, and then goes.

        Yields what is to be called when one of `total` steps is done, with what to say of it. The display is drawn then
        and not by a thread of its own, which would take time from what is measured.

        Parameters
        ----------
        measures : whether the task measures something; else a thread shows how long it has taken
        """
        if not self._can_redraw:
            self.begin(text)
            yield lambda now="": None
            return
        elapsed = None if measures and total is None else TimeElapsedColumn()
        columns, first = self._fitting(text, total, elapsed)
        with Progress(*columns, console=self.console, transient=True, auto_refresh=not measures) as progress:
            task = progress.add_task(first, total=total)
            progress.refresh()
            drawn = monotonic()

            def advance(now: str = "") -> None:
                nonlocal drawn
                progress.advance(task)
                if monotonic() - drawn > REDRAW_S:
                    if now:
                        progress.update(task, description=self._fitting(f"{text}: {now}", total, elapsed)[1])
                    progress.refresh()
                    drawn = monotonic()

            yield advance

    @contextmanager
    def following(self, text: str) -> Iterator[Tell]:
        """The same for a task of several parts, whose steps are not known before: yields what is told how far it is."""
        if not self._can_redraw:
            self.begin(text)
            yield tell_nobody
            return
        elapsed = TimeElapsedColumn()
        columns, first = self._fitting(text, MOST_STEPS, elapsed, tells_left=False)
        with Progress(*columns, console=self.console, transient=True, auto_refresh=False) as progress:
            task = progress.add_task(first, total=None)
            progress.refresh()

            def tell(part: str, done: int, total: int) -> None:
                shown = self._fitting(f"{text}: {part}", MOST_STEPS, elapsed, tells_left=False)[1]
                progress.update(task, description=shown, completed=done, total=total)
                progress.refresh()

            yield tell

    def _fitting(
        self, text: str, total: int | None, elapsed: ProgressColumn | None, tells_left: bool = True
    ) -> tuple[list[ProgressColumn], str]:
        """The columns that the terminal has room for, and what it has room for of the text: numbers are never cut."""
        numbers: list[tuple[int, list[ProgressColumn]]] = []
        if total is not None:
            numbers.append((2 * len(str(total)) + 2, [MofNCompleteColumn()]))
        if elapsed is not None:
            numbers.append((TIME_WIDTH, [elapsed]))
        if total is not None and tells_left:
            numbers.append((TIME_WIDTH + len(" left"), [TextColumn("left"), TimeRemainingColumn()]))
        room, shown = self.console.width, list[ProgressColumn]()
        for width, columns in numbers:
            if width > room:
                break
            room -= width
            shown += columns
        text = shortened(text, room) if room >= LEAST_TEXT else ""
        bar_width = min(MOST_BAR, room - len(text) - 2)
        if total is not None and bar_width >= LEAST_BAR:
            shown.insert(0, BarColumn(bar_width))
        return ([TextColumn("{task.description}", markup=False)] if text else []) + shown, text

    def reading(self, path: str | Path) -> AbstractContextManager[object]:
        """A file that is read: told where it is so large that it takes long."""
        try:
            size = Path(path).stat().st_size
        except OSError:
            size = 0
        text = f"reading {path}" + (f", {size / 1e6:,.0f} MB" if size >= LARGE_BYTES else "")
        return self.doing(text) if size >= LARGE_BYTES else nullcontext()


def has_widgets() -> bool:
    """Whether Jupyter's widgets are installed."""
    return find_spec("ipywidgets") is not None


class QuietReporter(Reporter):
    """Tells a Python program: progress where it can be shown, else nothing; what should be known as a warning."""

    def say(self, text: str) -> None:
        """Warn."""
        warnings.warn(text, stacklevel=3)

    def begin(self, text: str) -> None:
        """Say nothing."""


class SilentReporter(Reporter):
    """Tells nobody: of several processes that do the same, one tells."""

    def say(self, text: str) -> None:
        """Say nothing."""

    @property
    def _can_redraw(self) -> bool:
        return False
