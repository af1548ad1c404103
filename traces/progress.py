"""How a command tells how far it is: a live display on a terminal, plain lines elsewhere, always on stderr."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from time import monotonic
from typing import TypeAlias

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from opgrip.traces.terminal import console_for

REDRAW_S = 0.1
LARGE_BYTES = 20_000_000
"""Of a file that takes seconds to read."""

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

    def say(self, text: str) -> None:
        """One line that stays."""
        self.console.print(f"{self.prog}: {text}", markup=False, soft_wrap=True)

    def begin(self, text: str) -> None:
        """Tell of a task where its progress cannot be shown."""
        self.say(text)

    @contextmanager
    def doing(self, text: str, total: int | None = None, measures: bool = True) -> Iterator[Callable[[], None]]:
        """A task that runs while the block does; on a terminal it is shown with how far it is, and then goes.

        Yields what is to be called when one of `total` steps is done. The display is drawn then and not by a thread
        of its own, which would take time from what is measured.

        Parameters
        ----------
        measures : whether the task measures something; else a thread shows how long it has taken
        """
        if not (self.console.is_terminal or self.console.is_jupyter):
            self.begin(text)
            yield lambda: None
            return
        columns = [TextColumn("{task.description}", markup=False)]
        steps = [BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()] if total is not None else []
        left = [TextColumn("left"), TimeRemainingColumn()] if steps else []
        elapsed = [] if measures or steps else [TimeElapsedColumn()]
        shown = (*columns, *steps, *left, *elapsed)
        with Progress(*shown, console=self.console, transient=True, auto_refresh=not measures) as progress:
            task = progress.add_task(text, total=total)
            progress.refresh()
            drawn = monotonic()

            def advance() -> None:
                nonlocal drawn
                progress.advance(task)
                if monotonic() - drawn > REDRAW_S:
                    progress.refresh()
                    drawn = monotonic()

            yield advance

    @contextmanager
    def following(self, text: str) -> Iterator[Tell]:
        """The same for a task of several parts, whose steps are not known before: yields what is told how far it is."""
        if not (self.console.is_terminal or self.console.is_jupyter):
            self.begin(text)
            yield tell_nobody
            return
        columns = [TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn()]
        with Progress(
            *(*columns, TimeElapsedColumn()), console=self.console, transient=True, auto_refresh=False
        ) as progress:
            task = progress.add_task(text, total=None)
            progress.refresh()

            def tell(part: str, done: int, total: int) -> None:
                progress.update(task, description=f"{text}: {part}", completed=done, total=total)
                progress.refresh()

            yield tell

    def reading(self, path: str | Path) -> AbstractContextManager[object]:
        """A file that is read: told where it is so large that it takes long."""
        try:
            size = Path(path).stat().st_size
        except OSError:
            size = 0
        text = f"reading {path}" + (f", {size / 1e6:,.0f} MB" if size >= LARGE_BYTES else "")
        return self.doing(text) if size >= LARGE_BYTES else nullcontext()


class QuietReporter(Reporter):
    """Tells a Python program: progress where it can be shown, else nothing; what should be known as a warning."""

    def say(self, text: str) -> None:
        """Warn."""
        warnings.warn(text, stacklevel=3)

    def begin(self, text: str) -> None:
        """Say nothing."""
