"""Confirmation of what candidates (a user's implementations of operators) save, by a replay of the whole step whose
passes run with and without them in turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import fsum

from opgrip.cli.command import counted
from opgrip.cli.progress import ProgressCallback
from opgrip.errors import UserError
from opgrip.replay.results.judgement import CandidateColumns
from opgrip.replay.results.savings import JudgedStep, saving_in_words
from opgrip.replay.run.workload import Workload
from opgrip.replay.sequences.step_replay import replay_apart


@dataclass(frozen=True, slots=True)
class Confirmation:
    """The share of a step's replayed time that candidates save.

    saving : saved share of the step's time
    error : half of the 95 % interval of `saving`
    own_saving, own_error : part of `saving` in the calls of candidates, and half of its 95 % interval; the rest is in
        calls of other operators, which find other data in the caches
    share : share of the replayed step that these calls take without candidates
    calls : number of calls that the candidates ran
    passes : number of timed passes with candidates; as many ran without
    estimated : saving in the recorded step that is estimated from single calls; None if the trace has no times
    estimated_here : the same for the replayed step, in which the calls take other shares than in the recorded one
    """

    saving: float
    error: float
    own_saving: float
    own_error: float
    share: float
    calls: int
    passes: int
    estimated: float | None = None
    estimated_here: float | None = None

    @property
    def line(self) -> str:
        """The time that the candidates save per step, measured in a replay of the step, as one line of text."""
        estimated = ""
        if self.estimated is not None and self.estimated_here is not None:
            estimated = f"; estimated from single calls: {saving_in_words(self.estimated_here)}"
            estimated += f", {saving_in_words(self.estimated)} of the recorded step"
        return (
            f"confirmed by a replay of the whole step in {counted(self.passes, 'pass', 'passes')}: "
            f"{saving_in_words(self.saving, self.error)} of it, {saving_in_words(self.own_saving, self.own_error)} in "
            f"{counted(self.calls, 'call')} of candidates, which take {100 * self.share:.1f} % without them{estimated}"
        )


def confirm(workload: Workload, judged: JudgedStep | None, on_progress: ProgressCallback) -> Confirmation:
    """Replay the whole step with and without the candidates in turn; return what they save.

    judged : saving that is estimated from single calls
    Raises the same errors as `replay_apart`, and `UserError` if no pass succeeds.
    """
    step = replay_apart(workload, on_progress, may_fork=False)
    if step.saved is None:
        raise UserError("the whole step cannot be replayed with the candidates", step.failure)
    saved = step.saved
    confirmation = Confirmation(
        saving=saved.saving,
        error=saved.error,
        own_saving=saved.own_saving,
        own_error=saved.own_error,
        share=fsum(share for _, share in saved.shares),
        calls=step.calls - step.unsupported - step.in_eager,
        passes=len(step.replayed_ms),
    )
    if judged is None:
        return confirmation
    return replace(confirmation, estimated=judged.saving, estimated_here=_scaled(judged, dict(saved.shares), workload))


def _scaled(judged: JudgedStep, shares: Mapping[int, float], workload: Workload) -> float:
    """Return the saving estimated from single calls in a step in which each signature takes another share."""
    numbers = {case.number: case.trace_number for case in workload.cases}
    columns = [(shares.get(numbers[row.case], 0.0), CandidateColumns.of(row)) for row in judged.rows]
    return fsum(share * (item.step_saving or 0.0) / item.step_share for share, item in columns if item.step_share)
