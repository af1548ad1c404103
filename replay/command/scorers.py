"""Scores of results, which other packages compute: an entry point of the group `opgrip.scorers` registers a scorer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

from opgrip.cli.plugins import Registry

if TYPE_CHECKING:
    from opgrip.replay.outcome import Results


class Scorer(Protocol):
    """Prints scores of the results of `opreplay`."""

    def check(self, header: Mapping[str, Any]) -> None:
        """Raise `UserError` if a trace with this header cannot be scored although it asks for it."""

    def print_scores(self, results: Results, file: IO[str]) -> None:
        """Print the scores of a replay of one trace, if that has any."""

    def against(self, baseline: Path | None) -> Callable[[Results, IO[str]], None]:
        """Read a baseline, and return a function that prints the scores of several traces relative to it.

        Parameters
        ----------
        baseline : file of the baseline; None for the one that ships
        """


scorers: Registry[Scorer] = Registry(None, "opgrip.scorers")
