"""Progress of a command on stderr: a line that is updated in place on a terminal, and plain lines elsewhere."""

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
TIME_WIDTH = len(" 10:00:00")  # width of a time in characters
# widths in characters below which a text or a bar is left out, and the maximum width of a bar
LEAST_TEXT, LEAST_BAR, MOST_BAR = 12, 8, 40
MOST_STEPS = 9999  # largest number of steps for which the display reserves space
LARGE_BYTES = 20_000_000  # file size in bytes above which reading takes seconds


class Advance(Protocol):
    """Function that a task calls after each of its steps, to update the progress display."""

    def __call__(self, now: str = "") -> None:
        """Count one more finished step; `now` is a text about the current state, shown if the line has room for it."""


# callback with the name of a part of a task, its finished steps, and its total steps
ProgressCallback: TypeAlias = Callable[[str, int, int], None]


def ignore_progress(part: str, done: int, total: int) -> None: ...


class Reporter:
    """Prints a command's progress and notices, which begin with its name, to stderr."""

    def __init__(self, prog: str) -> None:
        self.prog = prog
        self.console = console_for(stderr=True)

    @property
    def _can_redraw(self) -> bool:
        return self.console.is_terminal or (self.console.is_jupyter and has_widgets())

    def say(self, text: str) -> None:
        self.console.print(f"{self.prog}: {text}", markup=False, soft_wrap=True)

    def begin(self, text: str) -> None:
        self.say(text)

    @contextmanager
    def doing(self, text: str, total: int | None = None, measures: bool = True) -> Iterator[Advance]:
        """Display the progress of a task; the block gets a function to call after each finished step."""
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
    def following(self, text: str) -> Iterator[ProgressCallback]:
        """Display the progress of a task with several parts; the block gets a function that reports on a part."""
        if not self._can_redraw:
            self.begin(text)
            yield ignore_progress
            return
        from rich.progress import Progress, TimeElapsedColumn

        elapsed = TimeElapsedColumn()
        columns, first = self._fitting(text, MOST_STEPS, elapsed, shows_remaining=False)
        with Progress(*columns, console=self.console, transient=True, auto_refresh=False) as progress:
            task = progress.add_task(first, total=None)
            progress.refresh()

            def on_progress(part: str, done: int, total: int) -> None:
                shown = self._fitting(f"{text}: {part}", MOST_STEPS, elapsed, shows_remaining=False)[1]
                progress.update(task, description=shown, completed=done, total=total)
                progress.refresh()

            yield on_progress

    def _fitting(
        self, text: str, total: int | None, elapsed: ProgressColumn | None, shows_remaining: bool = True
    ) -> tuple[list[ProgressColumn], str]:
        # columns are left out rather than cut, so that no number is shown incompletely
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

        numbers: list[tuple[int, list[ProgressColumn]]] = []
        if total is not None:
            numbers.append((2 * len(str(total)) + 2, [MofNCompleteColumn()]))
        if elapsed is not None:
            numbers.append((TIME_WIDTH, [elapsed]))
        if total is not None and shows_remaining:
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
        try:
            size = Path(path).stat().st_size
        except OSError:
            size = 0
        text = f"reading {path}" + (f", {size / 1e6:,.0f} MB" if size >= LARGE_BYTES else "")
        return self.doing(text) if size >= LARGE_BYTES else nullcontext()


def has_widgets() -> bool:
    return find_spec("ipywidgets") is not None


class QuietReporter(Reporter):
    def say(self, text: str) -> None:
        caller, level = sys._getframe(1), 2
        while caller.f_back is not None and caller.f_globals.get("__name__", "").startswith("opgrip."):
            caller, level = caller.f_back, level + 1
        warnings.warn(text, stacklevel=level)

    def begin(self, text: str) -> None: ...


class SilentReporter(Reporter):
    def say(self, text: str) -> None: ...

    @property
    def _can_redraw(self) -> bool:
        return False
