"""How cases are replayed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from opgrip.replay.arguments.inputs import DeviceMap
from opgrip.replay.arguments.values import RECORDED
from opgrip.replay.cases.cases import Case
from opgrip.replay.cases.ways import BACKWARD, EAGER, FORWARD, Point, Way
from opgrip.replay.checks import Tolerance
from opgrip.replay.modes import Tuning
from opgrip.replay.operators.lookup import TRUSTED_EXTENSIONS, Unsupported
from opgrip.replay.sweeps.batch import Batches, scaled
from opgrip.replay.timing.caches import PROGRAM
from opgrip.replay.timing.methods import DISCRETE, ON_DEVICE
from opgrip.replay.timing.samples import Effort


@dataclass(frozen=True, slots=True)
class Settings:
    """How cases are replayed.

    Attributes
    ----------
    place : where tensors go that were recorded on a device
    device : what the results name, and what is waited for
    seed : of the values that are drawn
    extensions : extension modules whose functions may be called
    values : ways to draw values, each a row of its own, as are `modes` and `points`
    modes : by name; results and times of all are compared with those of `reference`, which is one of them
    batches : which sizes of the calls are the batch; None where it is not scaled
    tolerance : of results that are compared with the reference's
    tuning : how long a compiler may search
    store : folder for what compilers made; None to keep nothing
    detail : keep the whole of an error, not its first line alone
    method : how a run is timed
    cache : what the caches hold when a run begins
    dtype : of floating-point tensors; None for the recorded one
    backward : time the gradients of calls of a forward pass too
    memory : measure what a call allocates
    memory_limit : bytes of a case's tensors above which it is not tried
    profiled : the profiler that watches what is timed; empty for none
    timelines : folder for what torch's profiler sees, where that is the one
    count_work : run what is no single operator once more, to count what its operators do
    energy : read what a GPU takes
    """

    place: DeviceMap
    device: str
    effort: Effort = Effort()  # noqa: RUF009 - frozen
    seed: int = 0
    extensions: Collection[str] = TRUSTED_EXTENSIONS
    values: Sequence[str] = (RECORDED,)
    modes: Sequence[str] = (EAGER,)
    reference: str = EAGER
    points: Sequence[Point] = (Point(),)
    batches: Batches | None = None
    tolerance: Tolerance = Tolerance()  # noqa: RUF009 - frozen
    tuning: Tuning = Tuning()  # noqa: RUF009 - frozen
    store: Path | None = None
    detail: bool = False
    method: str = DISCRETE
    cache: str = PROGRAM
    dtype: torch.dtype | None = None
    backward: bool = False
    memory: bool = False
    memory_limit: int | None = None
    profiled: str = ""
    timelines: Path | None = None
    count_work: bool = False
    energy: bool = False

    @property
    def by_clock_of_device(self) -> bool:
        """Whether runs are timed by the device's own clock, on torch's streams."""
        return self.method in ON_DEVICE

    def wants_grad(self, case: Case) -> bool:
        """Whether a case's calls make a graph, as they do in a program that runs backward."""
        return self.backward and case.phase == "forward"

    def ways(self, case: Case) -> list[Way]:
        """The ways in which a case is run: of the same values and point one after the other, the reference first."""
        directions = (FORWARD, BACKWARD) if self.wants_grad(case) else (FORWARD,)
        modes = sorted(self.modes, key=lambda mode: mode != self.reference)
        numbered_ways = enumerate(product(self.points, self.values, directions, modes))
        return [
            Way(number, values, direction, mode, point) for number, (point, values, direction, mode) in numbered_ways
        ]

    def scaled(self, case: Case, point: Point) -> Case:
        """A case with the batch of a point.

        Raises
        ------
        Unsupported : where it is not known which of its sizes are the batch's
        """
        if point.batch == 1:
            return case
        if self.batches is None or case.operator is not None:
            raise Unsupported("the batch can be scaled of single calls of a trace only")
        return scaled(case, point.batch, self.batches)

    def context_of(self, case: Case, way: Way) -> Mapping[str, Any]:
        """The settings of torch that a case runs under."""
        threads = way.point.threads
        return case.context if threads is None else {**case.context, "threads": threads}
