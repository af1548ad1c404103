"""Progress of a command on stderr: a live display on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Protocol, TypeAlias

from opgrip.cli.terminal import console_for
from opgrip.errors import shortened

if TYPE_CHECKING:
    from rich.progress import ProgressColumn

CLEAR = "\r\x1b[K"


@contextmanager
def loading(prog: str) -> Iterator[None]:
    """Show a progress line on a terminal while the block loads torch; print nothing if stderr is no terminal."""
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
"""width of a time in characters"""
LEAST_TEXT, LEAST_BAR, MOST_BAR = 12, 8, 40
"""widths in characters below which a text or a bar is left out, and the maximum width of a bar"""
MOST_STEPS = 9999
"""largest number of steps for which the display reserves space"""
LARGE_BYTES = 20_000_000
"""file size in bytes above which reading takes seconds"""


class Advance(Protocol):
    """Callback for a finished step of a task; `now` is a text about the current state, shown if the line has space."""

    def __call__(self, now: str = "") -> None:
        """Report a finished step."""


Tell: TypeAlias = Callable[[str, int, int], None]
"""callback with the name of a part of a task, its finished steps, and its total steps"""


def tell_nobody(part: str, done: int, total: int) -> None:
    """Ignore a progress report."""


class Reporter:
    """Prints a command's progress and notes to stderr.

    Parameters
    ----------
    prog : name of the command, printed at the start of plain lines
    """

    def __init__(self, prog: str) -> None:
        self.prog = prog
        self.console = console_for(stderr=True)

    @property
    def _can_redraw(self) -> bool:
        """Return True if the display can be updated: on a terminal, or in Jupyter with its widgets."""
        return self.console.is_terminal or (self.console.is_jupyter and has_widgets())

    def say(self, text: str) -> None:
        """Print a permanent line."""
        self.console.print(f"{self.prog}: {text}", markup=False, soft_wrap=True)

    def begin(self, text: str) -> None:
        """Report the start of a task whose progress cannot be shown."""
        self.say(text)

    @contextmanager
    def doing(self, text: str, total: int | None = None, measures: bool = True) -> Iterator[Advance]:
        """Show a task with its progress while the block runs; on a terminal the display is removed afterwards.

        Yields a callback for each finished step of `total`. The callback draws the display, because a thread that draws
        it would disturb measurements.

        Parameters
        ----------
        measures : True if the task measures times; if False, a thread updates the elapsed time
        """
        if not self._can_redraw:
            self.begin(text)
            yield lambda now="": None
            return
        from rich.progress import Progress, TimeElapsedColumn

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
        """Show a task of several parts with unknown numbers of steps; yield a callback for its progress."""
        if not self._can_redraw:
            self.begin(text)
            yield tell_nobody
            return
        from rich.progress import Progress, TimeElapsedColumn

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
        """Return the progress columns and the part of the text that fit into the terminal; numbers are never cut."""
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

        numbers: list[tuple[int, list[ProgressColumn]]] = []
        if total is not None:
            numbers.append((2 * len(str(total)) + 2, [MofNCompleteColumn()]))
        if elapsed is not None:
            numbers.append((TIME_WIDTH, [elapsed]))
        if total is not None and tells_left:
            numbers.append((TIME_WIDTH + len(" left"), [TextColumn("left"), TimeRemainingColumn()]))
        room = self.console.width
        shown: list[ProgressColumn] = []
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
        """Return a context manager that shows that a file is being read, if it is large."""
        try:
            size = Path(path).stat().st_size
        except OSError:
            size = 0
        text = f"reading {path}" + (f", {size / 1e6:,.0f} MB" if size >= LARGE_BYTES else "")
        return self.doing(text) if size >= LARGE_BYTES else nullcontext()


def has_widgets() -> bool:
    """Return True if Jupyter's widgets are installed."""
    return find_spec("ipywidgets") is not None


class QuietReporter(Reporter):
    """Reporter for Python programs: shows progress where possible, and raises notes as warnings."""

    def say(self, text: str) -> None:
        """Issue a warning."""
        warnings.warn(text, stacklevel=3)

    def begin(self, text: str) -> None:
        """Print nothing."""


class SilentReporter(Reporter):
    """Reporter that prints nothing, used in all but one of several identical processes."""

    def say(self, text: str) -> None:
        """Print nothing."""

    @property
    def _can_redraw(self) -> bool:
        return False
