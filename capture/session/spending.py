"""What a capture takes of the program's time: its own work, as measured, and its calls, as known and as steps show."""

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

BLOCKS, REPEATS, LEARNT = 20, 9, 4
"""Of the model that costs are measured on; the first of its steps teach the recorder what comes after what."""
CALLS = 4
"""Of a block: a linear layer makes two."""
INTEGERS = 7
"""Of a call's row, about, before any were counted."""
STEP_NS = 150_000
"""What a step that is recorded takes beside its calls, about: a transformer's took 600 us more, with four calls of
10 us, where recording was switched on for it alone."""


@dataclass(frozen=True, slots=True)
class Costs:
    """What recording takes where nothing is new, in ns.

    Attributes
    ----------
    call : of an operator, with its part of the modules around it
    passed : of a module that is called in a thread which is not recorded
    """

    call: float
    passed: float


class Spending:
    """What a recorder has taken of the program's time since it began.

    What the costs of calls reckon is multiplied by what steps show that calls take in this program.

    Attributes
    ----------
    steps : times of the program's steps
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._costs = measure_costs()
        self.steps = StepTimes()
        self._until_ns = self._of_calls_ns = 0.0
        self._recorded = 0

    def ns(self) -> float:
        """That, in ns."""
        reckoned = self._reckoned_ns()
        self._of_calls_ns += self.steps.factor * (reckoned - self._until_ns)
        self._until_ns = reckoned
        return self._recorder.observations.spent_ns + self._recorder.work.writing_ns + self._of_calls_ns

    def begin_step(self, is_recorded: bool | None) -> None:
        """Tell that a step begins in this thread; with None, that what begins is neither recorded nor left out."""
        if is_recorded:
            self._recorded += 1
        self.steps.begin(is_recorded, self._recorder.observations.spent_ns, self._reckoned_ns())

    def _reckoned_ns(self) -> float:
        recorder, costs = self._recorder, self._costs
        of_a_call = recorder.work.integers / recorder.work.calls if recorder.work.calls else INTEGERS
        calls = recorder.work.calls + recorder.threads.waiting / of_a_call
        return costs.call * calls + costs.passed * recorder.work.modules_passed + STEP_NS * self._recorded


def measure_costs() -> Costs:
    """What recording takes on this machine: in some hundredths of a second, by a model of many small layers."""
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
    """Many small layers, made without drawing any of the program's random numbers."""
    linears = [nn.utils.skip_init(nn.Linear, 8, 8, device="cpu") for _ in range(BLOCKS)]
    model = nn.Sequential(*(nn.Sequential(linear, nn.ReLU(), nn.Tanh()) for linear in linears)).eval()
    for parameter in model.parameters():
        # what lies in fresh memory may be slow to reckon with
        parameter.data.fill_(0.1)
    return model


def _usual_ns(step: Callable[[], object]) -> float:
    """What a step usually takes once it is known, in ns."""
    for _ in range(LEARNT):
        step()
    times = []
    for _ in range(REPEATS):
        began = perf_counter_ns()
        step()
        times.append(perf_counter_ns() - began)
    return median(times)
