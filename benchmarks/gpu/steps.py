"""List all steps by name, in the order in which they run."""

from __future__ import annotations

from collections.abc import Mapping

from gpu import captures, devices, failures, limits, modes, profilers, ranks, times
from gpu.step import Step

ROOMS = (captures, devices, failures, times, limits, modes, profilers, ranks)
STEPS: Mapping[str, Step] = {step.name: step for room in ROOMS for step in room.STEPS}
