"""The mode `eager`: operators run without compilation."""

from __future__ import annotations

from opgrip.replay.modes.mode import Program, Task, mode


@mode("eager", differentiable=True, ahead=False)
def run_as_called(task: Task) -> Program:
    return Program(task.function)
