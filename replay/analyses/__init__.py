"""Analyses of a replay, which add columns to its rows or print more about them.

An analysis is a module of this package, or an entry point `opgrip.analyses`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, ClassVar

from opgrip.cli.command import counted
from opgrip.cli.output_files import check_writable
from opgrip.cli.plugins import Registry
from opgrip.cli.progress import Reporter
from opgrip.errors import UserError
from opgrip.replay.results.columns import Columns
from opgrip.replay.results.results import Result

if TYPE_CHECKING:
    from opgrip.replay.run.workload import Workload


@dataclass(frozen=True, slots=True)
class AnalysisSession:
    """The replay that an analysis extends.

    output : file of the results, or None
    may_replace : True if existing files may be replaced
    resume : True to continue an interrupted run
    may_fork : True if this process can still be forked, because it has not run torch yet
    """

    workload: Workload
    output: Path | None
    may_replace: bool
    resume: bool
    reporter: Reporter
    may_fork: bool = False

    @property
    def timeout_s(self) -> float:
        return self.workload.request.limits.timeout

    @property
    def device(self) -> str:
        return self.workload.device

    @property
    def base(self) -> Path:
        """The output file or, without one, a path derived from the trace's."""
        if self.output is not None:
            return self.output
        # imported late because it loads torch, and `--help` imports this file
        from opgrip.replay.cases.sources.operator import PREFIX, name_of_target

        target = self.workload.request.trace
        return Path(name_of_target(target) if target.startswith(PREFIX) else Path(target).name)

    def running(self, rows: Sequence[Result], profiler: str) -> AbstractContextManager[object]:
        """Return a context that reports progress while the rows' cases run once more under `profiler`."""
        return self.reporter.doing(f"running {counted(len({row.case for row in rows}), 'case')} under {profiler}")

    def check_one_cache(self, profiler: str) -> None:
        """Raise `UserError` if rows differ in the state of caches, which a profiler's report does not show."""
        if len(self.workload.request.timing.caches) > 1:
            raise UserError(f"{profiler} profiles one cache state at a time", "give one to --cache")

    def check_one_device(self, profiler: str) -> None:
        """Raise `UserError` if cases run on several devices, because a profiler's report covers one process."""
        if self.workload.request.inputs.is_spread:
            raise UserError(f"{profiler} profiles one device", "name one with --device")

    def beside(self, suffix: str) -> Path:
        """Return `base` with another suffix; raise `UserError` if the file exists and must not be replaced."""
        path = self.base.with_suffix(suffix)
        check_writable(path, self.may_replace)
        return path


@dataclass(frozen=True, slots=True)
class NoOptions:
    """Empty options, for an analysis without options."""


class Analysis:
    """An analysis of a replay.

    It is created before any case runs, so that missing requirements are reported first. A subclass is in a module of
    this package, or in a module that an entry point `opgrip.analyses` names, and registers itself by
    `@analyses.register(NAME)`.
    columns : class of the columns that it adds, or None
    counts_work : True if it needs the operations and bytes of the operators in subgraphs and samples
    place : position in the order of analyses: low if it forks this process, high if it runs torch in it
    prints_partial : True if it can print results of an interrupted replay
    saw_all : False if some rows are left for `--resume`
    header : fields to add to the header of result files
    """

    options: ClassVar[type]
    columns: ClassVar[type[Columns] | None] = None
    counts_work: ClassVar[bool] = False
    place: ClassVar[int] = 100
    prints_partial: ClassVar[bool] = False

    def __init__(self, options: Any, session: AnalysisSession) -> None:
        self.session = session
        self.saw_all = True
        self.header: dict[str, Any] = {}

    @classmethod
    def is_requested(cls, options: Any) -> bool:
        """Return True if the options request this analysis; raise `UserError` if they contradict each other."""
        raise NotImplementedError

    def add_to(self, rows: Sequence[Result]) -> list[Result]:
        """Return the rows with this analysis's columns; raise `UserError` if the analysis fails."""
        return list(rows)

    def finish(self) -> None:
        """Remove the data kept for `--resume`; called after the results are written."""

    def print(self, rows: Sequence[Result], file: IO[str]) -> None:
        """Print further results that are not in columns."""


class UnaskedAnalysis(Analysis):
    """An analysis that only prints, and that runs without an option."""

    options = NoOptions
    prints_partial = True

    @classmethod
    def is_requested(cls, options: Any) -> bool:
        return True


analyses: Registry[type[Analysis]] = Registry("opgrip.replay.analyses", "opgrip.analyses")


def in_order() -> list[type[Analysis]]:
    return sorted(analyses.values(), key=lambda analysis: analysis.place)
