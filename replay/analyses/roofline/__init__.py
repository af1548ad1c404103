"""The roofline analysis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

from opgrip.cli.options import OUTPUT, option, titled
from opgrip.replay.analyses.analysis import Analysis, analyses
from opgrip.replay.analyses.roofline.limits import LimitColumns
from opgrip.replay.results.results import Result

if TYPE_CHECKING:
    from opgrip.traces.analysis.machine_ceilings import Ceilings


@titled("roofline and energy")
@dataclass(frozen=True, slots=True)
class RooflineOptions:
    """The option that compares rows with the machine's peaks."""

    roofline: bool = option(
        False,
        "compare each call with the machine's peak bandwidth and arithmetic rate, and report what limits "
        "it; -o roofline.svg plots it",
        only=("single cases", "one trace"),
        role=OUTPUT,
        common=True,
    )


@analyses.register("roofline")
class RooflineAnalysis(Analysis):
    """The analysis that compares each row's time with the least time that the machine could take."""

    options = RooflineOptions
    columns = LimitColumns
    place = 60
    counts_work = True

    @classmethod
    def is_requested(cls, options: RooflineOptions) -> bool:
        return options.roofline

    def add_to(self, rows: Sequence[Result]) -> list[Result]:
        from opgrip.replay.analyses.roofline.limits import dtype_of, threads_of, usual_threads, with_limits
        from opgrip.traces.analysis.machine_ceilings import to_json

        ceilings, threads = self._ceilings(), threads_of(self.session.workload)
        self.header = {"ceilings": to_json(ceilings), "threads": usual_threads(rows, threads)}
        return with_limits(rows, ceilings, threads, dtype_of(self.session.workload))

    def print(self, rows: Sequence[Result], file: IO[str]) -> None:
        from opgrip.replay.analyses.roofline.limits import print_roofline

        print_roofline(rows, file)

    def _ceilings(self) -> Ceilings:
        """Return the machine's peaks, and measure them the first time; this runs after the last fork."""
        from opgrip.replay.analyses.roofline.measuring import measure
        from opgrip.traces.analysis.machine_ceilings import keep, read_cached_ceilings

        device, reporter = self.session.device, self.session.reporter
        ceilings = read_cached_ceilings(device)
        if ceilings is None:
            with reporter.following("measuring what this machine gives at most") as tell:
                ceilings = measure(device, tell)
            reporter.say(f"opgrip machine shows it, from {keep(ceilings, device)}")
        return ceilings
