"""How cases are replayed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from opgrip.replay.arguments.inputs import DeviceMap
from opgrip.replay.arguments.values import RECORDED
from opgrip.replay.cases import Case
from opgrip.replay.operators import TRUSTED_EXTENSIONS
from opgrip.replay.timing.caches import PROGRAM
from opgrip.replay.timing.methods import DISCRETE
from opgrip.replay.timing.samples import Effort

EAGER = "eager"


@dataclass(frozen=True, slots=True)
class Settings:
    """How cases are replayed.

    Attributes
    ----------
    place : where tensors go that were recorded on a device
    device : what the results name, and what is waited for
    seed : of the values that are drawn
    extensions : extension modules whose functions may be called
    values : ways to draw values, each a row of its own
    method : how a run is timed
    cache : what the caches hold when a run begins
    threads : of an operator; None for as many as the program had
    dtype : of floating-point tensors; None for the recorded one
    backward : time the gradients of calls of a forward pass too
    memory : measure what a call allocates
    memory_limit : bytes of a case's tensors above which it is not tried
    """

    place: DeviceMap
    device: str
    effort: Effort = Effort()  # noqa: RUF009 - frozen
    seed: int = 0
    extensions: Collection[str] = TRUSTED_EXTENSIONS
    values: Sequence[str] = (RECORDED,)
    method: str = DISCRETE
    cache: str = PROGRAM
    threads: int | None = None
    dtype: torch.dtype | None = None
    backward: bool = False
    memory: bool = False
    memory_limit: int | None = None

    def wants_grad(self, case: Case) -> bool:
        """Whether a case's calls make a graph, as they do in a program that runs backward."""
        return self.backward and case.phase == "forward"

    def context_of(self, case: Case) -> Mapping[str, Any]:
        """The settings of torch that a case runs under."""
        return case.context if self.threads is None else {**case.context, "threads": self.threads}
