"""How a command tells how far it is: a live display on a terminal, plain lines elsewhere, always on stderr."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from opgrip.traces.terminal import console_for

REDRAW_S = 0.1


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
    def doing(self, text: str, total: int | None = None) -> Iterator[Callable[[], None]]:
        """A task that runs while the block does; on a terminal it is shown with how far it is, and then goes.

        Yields what is to be called when one of `total` steps is done. The display is drawn then and not by a thread
        of its own, which would take time from what is measured.
        """
        if not (self.console.is_terminal or self.console.is_jupyter):
            self.begin(text)
            yield lambda: None
            return
        columns = [TextColumn("{task.description}", markup=False)]
        steps = [BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()] if total is not None else []
        with Progress(*columns, *steps, console=self.console, transient=True, auto_refresh=False) as progress:
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


class QuietReporter(Reporter):
    """Tells a Python program: progress where it can be shown, else nothing; what should be known as a warning."""

    def say(self, text: str) -> None:
        """Warn."""
        warnings.warn(text, stacklevel=3)

    def begin(self, text: str) -> None:
        """Say nothing."""
