"""All steps, by name, in the order in which they are taken."""

from __future__ import annotations

from collections.abc import Mapping

from gpu import captures, devices, failures, limits, modes, profilers, times
from gpu.step import Step

STEPS: Mapping[str, Step] = {
    step.name: step for room in (captures, devices, failures, times, limits, modes, profilers) for step in room.STEPS
}
