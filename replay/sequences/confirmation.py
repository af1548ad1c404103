"""Confirmation of what candidates (a user's implementations of operators) save, by replays of the whole step with and
without them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum, hypot, sqrt
from statistics import fmean, median, pstdev

from opgrip.cli.progress import ProgressCallback
from opgrip.replay.modes import ModeOptions
from opgrip.replay.modes.candidate import CandidateOptions
from opgrip.replay.results.judgement import WITHIN_95
from opgrip.replay.results.savings import saving_in_words
from opgrip.replay.run.workload import Workload
from opgrip.replay.sequences.step_replay import replay_apart
from opgrip.replay.sequences.step_results import SequenceResult

OF_MEDIAN = 1.2533
"""standard error of a median over that of a mean"""


@dataclass(frozen=True, slots=True)
class Confirmation:
    """The share of a step's replayed time that candidates save.

    saving : saved share of the step's time
    error : half of the 95 % interval of `saving`
    share : share of the replayed step that the candidates' operators take
    calls : number of calls that the candidates ran
    estimated : saving that is estimated from single calls; None if the trace has no times
    """

    saving: float
    error: float
    share: float
    calls: int
    estimated: float | None

    @property
    def line(self) -> str:
        """The time that the candidates save per step, measured in replays of the step, as one line of text."""
        saving = saving_in_words(self.saving, self.error)
        estimated = "" if self.estimated is None else f"; estimated from single calls: {100 * self.estimated:.1f} %"
        return (
            f"confirmed by replays of the whole step: {saving} of it (these operators take {100 * self.share:.1f} %), "
            f"with {self.calls:,} calls of candidates{estimated}"
        )


def confirm(workload: Workload, estimated: float | None, on_progress: ProgressCallback) -> Confirmation:
    """Replay the whole step without, with, with, and without the candidates; return what they save.

    estimated : saving that is estimated from single calls
    on_progress : function called with the progress
    Raises the same errors as `replay_apart`.
    """
    plain = workload.with_request(modes=ModeOptions(), candidates=CandidateOptions())
    first, second, third, fourth = (
        replay_apart(item, on_progress, may_fork=False) for item in (plain, workload, workload, plain)
    )
    savings = [
        1 - median(ours.replayed_ms) / median(theirs.replayed_ms) for theirs, ours in ((first, second), (fourth, third))
    ]
    between = abs(savings[0] - savings[1]) / 2
    within = WITHIN_95 * hypot(*map(_relative_error, (first, second, third, fourth))) / 2
    return Confirmation(
        saving=fmean(savings),
        error=hypot(between, within),
        share=_share(first, workload),
        calls=_calls_of_candidates(second),
        estimated=estimated,
    )


def _share(step: SequenceResult, workload: Workload) -> float:
    """Return the share that the candidates' operators take in the time of all calls of a step without candidates."""
    times = {item.signature: (item.median_us or 0.0) * item.count for item in step.signatures}
    judged = {item.number for item in workload.trace.signatures if workload.candidates.find(item.op) is not None}
    return fsum(us for number, us in times.items() if number in judged) / (fsum(times.values()) or 1.0)


def _relative_error(step: SequenceResult) -> float:
    """Return the standard error of the median time of a step's passes, divided by that median."""
    times: Sequence[float] = step.replayed_ms
    return OF_MEDIAN * pstdev(times) / sqrt(len(times)) / median(times)


def _calls_of_candidates(step: SequenceResult) -> int:
    return step.calls - step.unsupported - step.in_eager
