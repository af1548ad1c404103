"""What an engine is: it runs the cases of replays, on this machine or on others, through the same stages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from opgrip.cli.plugins import Registry
from opgrip.errors import UserError

if TYPE_CHECKING:
    from opgrip.cli.progress import Reporter
    from opgrip.replay.results.results import Result
    from opgrip.replay.run.measure import CachedRows
    from opgrip.replay.workers.engines.engine_options import EngineOptions
    from opgrip.replay.workers.job import Job, Loaded


class EngineLostError(UserError):
    """No machine can run the cases of any replay: a command that has several ends, and keeps the rows it has."""


class CaseRunner(Protocol):
    """Runs the cases of one replay."""

    def check(self) -> None:
        """Raise `UserError` where the devices are not there."""

    def machine_kind(self) -> str:
        """What the machines are that run the cases: an interrupted replay goes on only on such."""

    def about(self) -> dict[str, Any]:
        """What the header of results says of the machines and devices, after the cases have run."""

    def compile(self, done: Collection[int], reporter: Reporter) -> CachedRows:
        """What came of making the rows ready that take a compiler, of the cases that are not done."""

    def run(self, done: Collection[int], cached_rows: CachedRows) -> Iterator[list[Result]]:
        """The rows of each case that is not done, in any order, each case once."""


class Engine(Protocol):
    """Makes runners of cases, one for each of the replays of a command.

    Attributes
    ----------
    here : whether cases run on this machine
    """

    here: bool

    def runner(self, job: Job, loaded: Loaded, may_fork: bool) -> CaseRunner:
        """What runs the cases of one replay.

        Parameters
        ----------
        may_fork : whether this process has run nothing of torch yet, and forks of it can
        """


StartEngine = Callable[["EngineOptions"], AbstractContextManager[Engine]]
"""Starts an engine, which ends with the block."""

engines: Registry[StartEngine] = Registry("opgrip.replay.workers.engines", "opgrip.engines")
"""By name."""
