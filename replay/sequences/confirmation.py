"""Confirmation of what candidates (a user's implementations of operators) save, by replays of the whole step with and
without them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import hypot, sqrt
from statistics import fmean, median, pstdev

from opgrip.cli.progress import Tell
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
    calls : number of calls that the candidates ran
    """

    saving: float
    error: float
    calls: int

    @property
    def line(self) -> str:
        """The saving as one line of text."""
        saving = saving_in_words(self.saving, self.error)
        return f"confirmed by replays of the whole step: {saving}, with {self.calls:,} calls of candidates"


def confirm(workload: Workload, tell: Tell) -> Confirmation:
    """Replay the whole step without, with, with, and without the candidates; return what they save.

    tell : function called with the progress
    Raises the same errors as `replay_apart`.
    """
    plain = workload.with_request(modes=ModeOptions(), candidates=CandidateOptions())
    first, second, third, fourth = (
        replay_apart(item, tell, may_fork=False) for item in (plain, workload, workload, plain)
    )
    savings = [
        1 - median(ours.replayed_ms) / median(theirs.replayed_ms) for theirs, ours in ((first, second), (fourth, third))
    ]
    between = abs(savings[0] - savings[1]) / 2
    within = WITHIN_95 * hypot(*map(_relative_error, (first, second, third, fourth))) / 2
    return Confirmation(fmean(savings), hypot(between, within), _calls_of_candidates(second))


def _relative_error(step: SequenceResult) -> float:
    """Return the standard error of the median time of a step's passes, divided by that median."""
    times: Sequence[float] = step.replayed_ms
    return OF_MEDIAN * pstdev(times) / sqrt(len(times)) / median(times)


def _calls_of_candidates(step: SequenceResult) -> int:
    return step.calls - step.unsupported - step.in_eager
