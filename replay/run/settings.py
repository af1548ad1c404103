"""How cases are replayed, and what the worker processes may use."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, get_type_hints

from opgrip.cli.command import positive
from opgrip.cli.option_types import byte_count, seconds
from opgrip.cli.options import EFFORT, option, titled
from opgrip.replay.cases.variants import BACKWARD, FORWARD, Point, PointOptions, Variant
from opgrip.replay.checks.verdicts import Tolerance
from opgrip.replay.inputs.input_options import InputOptions
from opgrip.replay.modes import ModeOptions, Tuning
from opgrip.replay.operators.admission import Unsupported
from opgrip.replay.run.energy import EnergyOptions
from opgrip.replay.timing.timing_options import Effort, TimingOptions

if TYPE_CHECKING:
    import torch

    from opgrip.replay.batch_scale.batch_scale import BatchScale
    from opgrip.replay.cases.cases import Case
    from opgrip.replay.inputs.inputs import DeviceMap


@titled("limits")
@dataclass(frozen=True, slots=True)
class Limits:
    """Of a case's run, and of what is made ready before."""

    timeout: float = option(
        120.0,
        "end a case of which one run takes longer, of a sequence a call (default: %(default)g)",
        parse=seconds,
        metavar="SECONDS",
        role=EFFORT,
    )
    memory_limit: int | None = option(
        None,
        "for cases, such as 8GB (default: what the machine has left)",
        parse=byte_count,
        metavar="BYTES",
        role=EFFORT,
    )
    jobs: int | None = option(
        None,
        "cases that compile at once (default: one a processor; on an accelerator four at most)",
        parse=positive,
        metavar="N",
        only=("single cases",),
        role=EFFORT,
    )

    @property
    def compilers(self) -> int:
        """Cases that compile at once."""
        return self.jobs or len(os.sched_getaffinity(0))


@dataclass(frozen=True, slots=True)
class Plan:
    """How cases are run, as options say it, in plain values; a worker process is told it so.

    Attributes
    ----------
    detail : keep the whole of an error, not its first line alone
    store : folder for what compilers made; None to keep nothing
    profiled : the profiler that watches what is timed, and needs processes that end by themselves; empty for none
    timelines : folder for what torch's profiler sees, where that is the one
    count_work : run what is no single operator once more, to count what its operators do
    """

    inputs: InputOptions = field(default_factory=InputOptions)
    points: PointOptions = field(default_factory=PointOptions)
    modes: ModeOptions = field(default_factory=ModeOptions)
    tuning: Tuning = field(default_factory=Tuning)
    tolerance: Tolerance = field(default_factory=Tolerance)
    timing: TimingOptions = field(default_factory=TimingOptions)
    effort: Effort = field(default_factory=Effort)
    energy: EnergyOptions = field(default_factory=EnergyOptions)
    limits: Limits = field(default_factory=Limits)
    detail: bool = False
    store: str | None = None
    profiled: str = ""
    timelines: str | None = None
    count_work: bool = False


GROUPS: dict[str, Any] = {name: kind for name, kind in get_type_hints(Plan).items() if is_dataclass(kind)}
"""The classes of options that a plan holds, by the names of its fields."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(Plan):
    """A plan, with what it means for one trace.

    Attributes
    ----------
    place : where tensors go that were recorded on a device
    device : what the results name, and what is waited for
    batches : which sizes of the calls are the batch; None where it is not scaled
    memory : measure what a call allocates
    adds_gradients : require gradients of floating-point arguments, as the source does not say which require them
    """

    place: DeviceMap
    device: str
    batches: BatchScale | None = None
    memory: bool = False
    adds_gradients: bool = False

    @property
    def by_clock_of_device(self) -> bool:
        """Whether runs are timed by the device's own clock, on torch's streams."""
        return self.timing.by_clock_of_device

    @property
    def dtype(self) -> torch.dtype | None:
        """Of floating-point tensors; None for the recorded one."""
        from opgrip.traces.schema.arguments import DTYPES

        return None if self.inputs.dtype is None else DTYPES[self.inputs.dtype]

    def wants_grad(self, case: Case) -> bool:
        """Whether a case's calls make a graph, as they do in a program that runs backward.

        Not where an operator writes into its arguments: what is drawn is a leaf, which autograd lets nobody write into.
        """
        # imports torch
        from opgrip.replay.operators.lookup import mutates

        writes = case.operator is None and mutates(case.signature)
        return self._runs_backward(case) and not writes

    def _runs_backward(self, case: Case) -> bool:
        return self.timing.backward and case.phase == "forward"

    def ways(self, case: Case) -> list[Variant]:
        """The ways in which a case is run: of the same values and point one after the other, the reference first."""
        directions = (FORWARD, BACKWARD) if self._runs_backward(case) else (FORWARD,)
        caches = self.timing.caches if len(self.timing.caches) > 1 else (None,)
        combinations = product(caches, self.points, self.inputs.values, directions, self.modes.all_names)
        return [
            Variant(number, values, direction, mode, point, cache)
            for number, (cache, point, values, direction, mode) in enumerate(combinations)
        ]

    def cache_of(self, way: Variant) -> str:
        """What caches hold before a run."""
        return way.cache or self.timing.caches[0]

    def scaled(self, case: Case, point: Point) -> Case:
        """A case with the batch of a point.

        Raises
        ------
        Unsupported : where it is not known which of its sizes are the batch's
        """
        from opgrip.replay.batch_scale.batch_scale import scaled

        if point.batch == 1:
            return case
        if self.batches is None or case.operator is not None or case.load is not None:
            raise Unsupported("the batch can be scaled of single calls of a trace only")
        return scaled(case, point.batch, self.batches)

    def context_of(self, case: Case, way: Variant) -> Mapping[str, Any]:
        """The settings of torch that a case runs under."""
        threads = way.point.threads
        return case.context if threads is None else {**case.context, "threads": threads}
