"""Time by which a capture slows the program: the measured time of its work, and the estimated cost of recorded
calls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import perf_counter_ns

import torch
from torch import nn

from opgrip.capture.hooks.dispatch import RecordingMode
from opgrip.capture.hooks.scopes import ScopeWatch
from opgrip.capture.recording.recorder import Recorder
from opgrip.capture.timing.budget import StepTimes

# number of blocks of the model on which costs are measured, number of timed steps, and number of steps before them in
# which the recorder learns the sequence of calls
BLOCKS, REPEATS, LEARNT = 20, 9, 4
CALLS = 4  # number of calls per block; a linear layer makes two calls
INTEGERS = 7  # approximate number of integers that are stored per call, used before any call was counted
# approximate cost in ns of recording a step, in addition to its calls. Measured: a transformer's step took 600 us
# longer when only that step was recorded, with four calls of 10 us each
STEP_NS = 150_000


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of recording in ns, if no signature or scope is new.

    call : cost per operator call, including a part of the cost of the modules around it
    passed : cost per call of a module in a thread that is not recorded
    """

    call: float
    passed: float


class Spending:
    """Time by which a recorder has slowed the program since it began.

    The cost of calls, measured on a small model, is multiplied by a factor derived from the times of the program's
    steps.

    steps : times of the program's steps
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._costs = measure_costs()
        self.steps = StepTimes()
        self._until_ns = self._of_calls_ns = 0.0
        self._recorded = 0

    def ns(self) -> float:
        """Return the time in ns by which the recorder has slowed the program so far."""
        reckoned = self._reckoned_ns()
        self._of_calls_ns += self.steps.factor * (reckoned - self._until_ns)
        self._until_ns = reckoned
        return self._recorder.observations.spent_ns + self._recorder.work.writing_ns + self._of_calls_ns

    def begin_step(self, is_recorded: bool | None) -> None:
        """Note that this thread begins a step, or that it is now outside of all steps.

        is_recorded : True if the step is recorded, False if it is left out of the recording; None if no step begins
        """
        if is_recorded:
            self._recorded += 1
        self.steps.begin(is_recorded, self._recorder.observations.spent_ns, self._reckoned_ns())

    def _reckoned_ns(self) -> float:
        recorder, costs = self._recorder, self._costs
        of_a_call = recorder.work.integers / recorder.work.calls if recorder.work.calls else INTEGERS
        calls = recorder.work.calls + recorder.threads.waiting / of_a_call
        return costs.call * calls + costs.passed * recorder.work.modules_passed + STEP_NS * self._recorded


def measure_costs() -> Costs:
    """Return the costs of recording on this machine, measured with a small model in a few hundredths of a second."""
    recorder = Recorder(RecordingMode, by_steps=True)
    model, tensor = _small_model(), torch.ones(4, 8, device="cpu")
    modules = sum(1 for _ in model.modules())
    with torch.no_grad():
        alone = _usual_ns(lambda: model(tensor))
        with ScopeWatch(recorder):
            passed = _usual_ns(lambda: model(tensor))
            mode = recorder.threads.here()
            with mode:
                mode.idle = False
                recorded = _usual_ns(lambda: model(tensor))
    return Costs(max(0.0, recorded - alone) / (CALLS * BLOCKS), max(0.0, passed - alone) / modules)


def _small_model() -> nn.Module:
    """Return a model of many small layers, made without the program's random number generators."""
    linears = [nn.utils.skip_init(nn.Linear, 8, 8, device="cpu") for _ in range(BLOCKS)]
    model = nn.Sequential(*(nn.Sequential(linear, nn.ReLU(), nn.Tanh()) for linear in linears)).eval()
    for parameter in model.parameters():
        # values in newly mapped memory may be slow to compute with
        parameter.data.fill_(0.1)
    return model


def _usual_ns(step: Callable[[], object]) -> float:
    """Return the median time in ns of the function `step`, without the first calls, in which its signatures are new to
    the recorder.
    """
    for _ in range(LEARNT):
        step()
    times = []
    for _ in range(REPEATS):
        began = perf_counter_ns()
        step()
        times.append(perf_counter_ns() - began)
    return median(times)
