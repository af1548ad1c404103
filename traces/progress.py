"""How a command tells how far it is: a live display on a terminal, plain lines elsewhere, always on stderr."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


class Reporter:
    """Tells what a command does.

    Parameters
    ----------
    prog : the command's name, which plain lines begin with
    """

    def __init__(self, prog: str) -> None:
        self.prog = prog
        self.console = Console(stderr=True, highlight=False)

    def say(self, text: str) -> None:
        """One line that stays."""
        self.console.print(f"{self.prog}: {text}", markup=False, soft_wrap=True)

    @contextmanager
    def doing(self, text: str, total: int | None = None) -> Iterator[Progress | None]:
        """A task that runs while the block does; on a terminal it is shown alive and then goes."""
        if not self.console.is_terminal:
            self.say(text)
            yield None
            return
        columns = [SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()]
        if total is not None:
            columns[2:2] = [BarColumn(), MofNCompleteColumn()]
        with Progress(*columns, console=self.console, transient=True) as progress:
            progress.add_task(text, total=total)
            yield progress


def advance(progress: Progress | None, text: str | None = None) -> None:
    """One step of a `Reporter.doing` is done; `text` says what comes next."""
    if progress is None:
        return
    for task in progress.task_ids:
        if text is None:
            progress.advance(task)
        else:
            progress.update(task, description=text, advance=1)
