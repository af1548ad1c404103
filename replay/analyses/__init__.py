"""Analyses of a replay, such as profilers, which add columns to the result rows or print more about them."""

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
    """The replay whose results an analysis extends.

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
        if self.output is not None:
            return self.output
        # imported late because it loads torch, and `--help` imports this file
        from opgrip.replay.cases.sources.operator import PREFIX, name_of_target

        target = self.workload.request.trace
        return Path(name_of_target(target) if target.startswith(PREFIX) else Path(target).name)

    def running(self, rows: Sequence[Result], profiler: str) -> AbstractContextManager[object]:
        return self.reporter.doing(f"running {counted(len({row.case for row in rows}), 'case')} under {profiler}")

    def check_one_cache(self, profiler: str) -> None:
        if len(self.workload.request.timing.caches) > 1:
            raise UserError(
                f"{profiler} profiles one cache state at a time", "name one with --cache, such as --cache warm"
            )

    def check_one_device(self, profiler: str) -> None:
        if self.workload.request.inputs.is_spread:
            raise UserError(f"{profiler} profiles one device", "name one with --device")

    def beside(self, suffix: str) -> Path:
        """Return the path of the output with another suffix, after a check that the file may be written."""
        path = self.base.with_suffix(suffix)
        check_writable(path, self.may_replace)
        return path


@dataclass(frozen=True, slots=True)
class NoOptions:
    pass


class Analysis:
    """Base class of an analysis of a replay's results; a subclass registers itself by `@analyses.register(NAME)`.

    order : position among the analyses: low if it forks this process, high if it runs torch in this process
    prints_partial : True if it can print results of an interrupted replay
    """

    options: ClassVar[type]
    columns: ClassVar[type[Columns] | None] = None
    counts_work: ClassVar[bool] = False
    order: ClassVar[int] = 100
    prints_partial: ClassVar[bool] = False

    def __init__(self, options: Any, session: AnalysisSession) -> None:
        self.session = session
        self.saw_all = True
        self.header: dict[str, Any] = {}

    @classmethod
    def is_requested(cls, options: Any) -> bool:
        raise NotImplementedError

    def add_to(self, rows: Sequence[Result]) -> list[Result]:
        return list(rows)

    def finish(self) -> None:
        """Delete files that were kept for `--resume`; called after the result file is written."""

    def print(self, rows: Sequence[Result], file: IO[str]) -> None: ...


class UnaskedAnalysis(Analysis):
    options = NoOptions
    prints_partial = True

    @classmethod
    def is_requested(cls, options: Any) -> bool:
        return True


analyses: Registry[type[Analysis]] = Registry("opgrip.replay.analyses", "opgrip.analyses")


def in_order() -> list[type[Analysis]]:
    return sorted(analyses.values(), key=lambda analysis: analysis.order)
