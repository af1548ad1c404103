"""What a capture tells of itself at its end: what was asked for and is not in the trace."""

from __future__ import annotations

from collections.abc import Iterator

from opgrip.capture.recording.recorder import Recorder
from opgrip.capture.session.schedule import ALWAYS, Schedule


def notes_of_recorder(recorder: Recorder) -> Iterator[str]:
    """What was not recorded of calls."""
    if recorder.kernels is not None and recorder.kernels.failure is not None:
        yield f"the trace lacks times of kernels: {recorder.kernels.failure}"
    budget = recorder.budget
    if budget is not None and budget.is_overdrawn:
        yield (
            f"the recording took more than {budget.share:.3g} of the program's time: tell it by step() where steps "
            "end, so that it can leave some out"
        )


def notes_of_schedule(schedule: Schedule, steps: int, has_recorded: bool) -> Iterator[str]:
    """What a schedule named that never came.

    Parameters
    ----------
    steps : that the program told of
    """
    if schedule == ALWAYS:
        return
    if not steps:
        yield "step() was never called: for the schedule, the whole program was one step"
    elif not has_recorded:
        yield f"no step was recorded: the program made {steps}, and the schedule begins after them"
