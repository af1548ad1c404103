"""Scores of results: other packages register scorers with the entry point group `opgrip.scorers`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

from opgrip.cli.plugins import Registry

if TYPE_CHECKING:
    from opgrip.replay.outcome import Results


class Scorer(Protocol):
    """A scorer for the results of `opreplay`."""

    def check(self, header: Mapping[str, Any]) -> None:
        """Raise `UserError` if the header of a trace requests a score that cannot be computed."""

    def print_scores(self, results: Results, file: IO[str]) -> None:
        """Print the scores of a replay of one trace, if it has any."""

    def against(self, baseline: Path | None) -> Callable[[Results, IO[str]], None]:
        """Read a baseline, and return a function that prints the scores of several traces relative to it.

        Parameters
        ----------
        baseline : file of the baseline, or None for the one that is installed
        """


scorers: Registry[Scorer] = Registry(None, "opgrip.scorers")
