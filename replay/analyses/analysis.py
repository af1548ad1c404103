"""What an analysis is: it adds to the rows of a replay what it finds out of them, or by running their cases again."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, ClassVar

from opgrip.cli.output_files import check_writable
from opgrip.cli.plugins import Registry
from opgrip.cli.plural import counted
from opgrip.cli.progress import Reporter
from opgrip.errors import UserError
from opgrip.replay.results.columns import Columns
from opgrip.replay.results.results import Result

if TYPE_CHECKING:
    from opgrip.replay.workers.job import Job, Loaded


@dataclass(frozen=True, slots=True)
class Session:
    """The replay that an analysis adds to.

    Attributes
    ----------
    output : the file that the results go to; None where they go to none
    may_replace : whether what is written may exist already
    resume : go on with what an interrupted run left beside the output
    may_fork : whether this process has run nothing of torch yet, and forks of it can
    """

    job: Job
    loaded: Loaded
    output: Path | None
    may_replace: bool
    resume: bool
    reporter: Reporter
    may_fork: bool = False

    @property
    def timeout_s(self) -> float:
        """Of one run."""
        return self.job.plan.limits.timeout

    @property
    def device(self) -> str:
        """That the cases run on."""
        return self.loaded.settings.device

    @property
    def base(self) -> Path:
        """The output, or a file of the trace's name where there is none."""
        if self.output is not None:
            return self.output
        # it loads torch, and this file is loaded to show the help
        from opgrip.replay.cases.sources.operator import PREFIX, name_of_target

        target = self.job.trace
        return Path(name_of_target(target) if target.startswith(PREFIX) else Path(target).name)

    def running(self, rows: Sequence[Result], profiler: str) -> AbstractContextManager[object]:
        """Tell that the rows' cases run once more, while the block runs."""
        return self.reporter.doing(f"running {counted(len({row.case for row in rows}), 'case')} under {profiler}")

    def check_one_cache(self, profiler: str) -> None:
        """Raise `UserError` where rows differ in what caches hold, which a profiler's ranges do not tell."""
        if len(self.job.plan.timing.caches) > 1:
            raise UserError(f"{profiler} sees one state of the caches", "give one to --cache")

    def check_one_device(self, profiler: str) -> None:
        """Raise `UserError` where the cases are spread over devices, of whose processes a profiler's report has one."""
        if self.job.plan.inputs.is_spread:
            raise UserError(f"{profiler} watches one device", "name one with --device")

    def beside(self, suffix: str) -> Path:
        """`base` with another suffix.

        Raises
        ------
        UserError : where it exists and must not
        """
        path = self.base.with_suffix(suffix)
        check_writable(path, self.may_replace)
        return path


@dataclass(frozen=True, slots=True)
class NoOptions:
    """Of an analysis that is there wherever it has something to say."""


class Analysis:
    """One analysis of a replay. It is made before any case runs, so that what it lacks is said first.

    A class below this one stands in a file or folder here, or in a module that an entry point `opgrip.analyses` names,
    and enters itself by `@analyses.register(NAME)`.

    Attributes
    ----------
    options : the class of its options
    columns : the class of its columns; None where it adds none
    counts_work : whether it needs to know what the operators of units and samples do
    place : among the analyses, which run by it: those that fork this process first, those that run torch in it last
    prints_partial : whether it can print what it has of the rows of an interrupted replay too
    saw_all : whether it saw all that it should, so that there is nothing to go on with
    header : what files say besides where the rows come from
    """

    options: ClassVar[type]
    columns: ClassVar[type[Columns] | None] = None
    counts_work: ClassVar[bool] = False
    place: ClassVar[int] = 100
    prints_partial: ClassVar[bool] = False

    def __init__(self, options: Any, session: Session) -> None:
        self.session = session
        self.saw_all = True
        self.header: dict[str, Any] = {}

    @classmethod
    def is_requested(cls, options: Any) -> bool:
        """Whether the options ask for it; raises `UserError` where they do not go together."""
        raise NotImplementedError

    def add_to(self, rows: Sequence[Result]) -> list[Result]:
        """The rows with what it adds to them, as they are where that is nothing; raises `UserError` where it fails."""
        return list(rows)

    def finish(self) -> None:
        """Remove what it kept to go on with: the results are written, and it saw all."""

    def print(self, rows: Sequence[Result], file: IO[str]) -> None:
        """Print what it has for people besides its columns of the table."""


class UnaskedAnalysis(Analysis):
    """One that only prints, of whatever rows there are, and needs no option."""

    options = NoOptions
    prints_partial = True

    @classmethod
    def is_requested(cls, options: Any) -> bool:
        """Always."""
        return True


analyses: Registry[type[Analysis]] = Registry("opgrip.replay.analyses", "opgrip.analyses")
"""Analyses by name."""


def in_order() -> list[type[Analysis]]:
    """The analyses in the order in which they run."""
    return sorted(analyses.values(), key=lambda analysis: analysis.place)
