"""A replay as plain data, which a worker process is told, and what it stands for."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path

import pandas as pd

from opgrip.replay.arguments.inputs import device_map
from opgrip.replay.arguments.values import RECORDED
from opgrip.replay.cases.cases import Case, Selection, make_cases
from opgrip.replay.cases.samples import gripped_calls, sample_cases
from opgrip.replay.cases.surroundings import Surroundings, make_surroundings
from opgrip.replay.cases.units import CALL, make_units
from opgrip.replay.cases.ways import EAGER, Point
from opgrip.replay.checks import Tolerance
from opgrip.replay.measuring.settings import Settings
from opgrip.replay.modes import Tuning
from opgrip.replay.operators.lookup import TRUSTED_EXTENSIONS
from opgrip.replay.sweeps.batch import Batches
from opgrip.replay.timing.caches import PROGRAM
from opgrip.replay.timing.methods import DISCRETE
from opgrip.replay.timing.samples import Effort
from opgrip.traces import Trace, load
from opgrip.traces.arguments import DTYPES, tensors
from opgrip.traces.errors import UserError

SAMPLE = "sample"
"""The unit of cases that are samples."""

NO_TRACE = Trace({}, [], [], {}, pd.DataFrame())


@dataclass(frozen=True, slots=True)
class Job:
    """What to replay, and how; every field is a plain value.

    Attributes
    ----------
    trace : path of the trace, or the samples' name
    unit : what a case is made of: `call`, or all calls of a `function` or a `module` as one; `sample` without a trace
    tags, ops, modules, top, start, stop : which cases; tags are of samples, the last two places in the table's order
    samples : folders of gripped samples, whose code is trusted: the trace's calls of them are the cases
    device, dtype : to replay with, None for those of the program
    threads : of an operator, one point of a sweep each; none for as many as in the program
    batch_scale, streams : further dimensions of the sweep; see `Point`
    modes, reference : what is run, and which of it the others are compared with
    rtol, atol : of results that are compared; None for what is usual for their dtype
    tune, tuner : programs that a compiler may try, and its way to search
    cpus : that the runs are bound to; none for those of the process
    detail : keep the whole of an error
    store : folder for what compilers made
    memory_limit : bytes
    profiled : the profiler that watches, which is told what is timed and needs processes that end by themselves
    timelines : folder for what torch's profiler sees, where that is the one
    count_work, energy : see `Settings`
    """

    trace: str
    partial: bool = False
    unit: str = CALL
    tags: Sequence[str] = ()
    samples: Sequence[str] = ()
    ops: Sequence[str] = ()
    modules: Sequence[str] = ()
    top: int | None = None
    start: int = 0
    stop: int | None = None
    device: str | None = None
    dtype: str | None = None
    threads: Sequence[int] = ()
    batch_scale: Sequence[int] = (1,)
    streams: Sequence[int] = (1,)
    modes: Sequence[str] = (EAGER,)
    reference: str = EAGER
    rtol: float | None = None
    atol: float | None = None
    tune: int = 0
    tuner: str | None = None
    cpus: Sequence[int] = ()
    detail: bool = False
    store: str | None = None
    values: Sequence[str] = (RECORDED,)
    method: str = DISCRETE
    cache: str = PROGRAM
    backward: bool = False
    warmup: int = Effort().warmup
    iterations: int | None = None
    precision: float = Effort().precision
    budget_s: float = Effort().budget_s
    seed: int = 0
    extensions: Sequence[str] = ()
    memory_limit: int | None = None
    profiled: str = ""
    timelines: str | None = None
    count_work: bool = False
    energy: bool = False

    def load(self) -> Loaded:
        """Its trace, cases and settings.

        Raises
        ------
        UserError : where the trace cannot be read, or nothing of it is selected
        """
        selection = Selection(tuple(self.ops), tuple(self.modules), self.top)
        trace = NO_TRACE if self.unit == SAMPLE else load(self.trace, partial=self.partial)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            # what old versions of packages say of each other is not the user's
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.simplefilter("ignore", FutureWarning)
            selected = self._selected(trace, selection)
        cases = selected[self.start : self.stop]
        notes = [trace.missing] if trace.missing else []
        notes += dict.fromkeys(str(warning.message) for warning in caught)
        if not cases:
            raise UserError(f"no case is left from --start {self.start} to --stop {self.stop}", "the first is case 0")
        everything = selected if selection == Selection() and self.unit == CALL else None
        ran = self.unit == SAMPLE or bool(self.samples)
        return Loaded(trace, cases, self.settings(trace), notes, everything, self.unit, ran)

    def settings(self, trace: Trace) -> Settings:
        """How cases of a trace are replayed."""
        recorded = recorded_device(trace)
        return Settings(
            place=device_map(recorded, self.device),
            device=self.device or recorded,
            effort=Effort(self.warmup, self.iterations, self.precision, self.budget_s),
            seed=self.seed,
            extensions=(*TRUSTED_EXTENSIONS, *self.extensions),
            values=tuple(self.values),
            method=self.method,
            cache=self.cache,
            modes=tuple(self.modes),
            reference=self.reference,
            points=tuple(
                Point(threads, batch, streams)
                for threads, batch, streams in product(self.threads or (None,), self.batch_scale, self.streams)
            ),
            batches=Batches(trace) if any(scale != 1 for scale in self.batch_scale) else None,
            tolerance=Tolerance(self.rtol, self.atol),
            tuning=Tuning(self.tune, self.tuner),
            store=None if self.store is None else Path(self.store),
            detail=self.detail,
            dtype=None if self.dtype is None else DTYPES[self.dtype],
            backward=self.backward,
            memory_limit=self.memory_limit,
            profiled=self.profiled,
            timelines=None if self.timelines is None else Path(self.timelines),
            count_work=self.count_work,
            energy=self.energy,
        )

    def _selected(self, trace: Trace, selection: Selection) -> list[Case]:
        if self.unit == SAMPLE:
            return sample_cases(self.trace, self.ops, self.tags)[: self.top]
        if self.unit == CALL:
            return make_cases(trace, selection)
        if self.samples:
            return gripped_calls(trace, selection, list(map(Path, self.samples)))
        return make_units(trace, selection, self.unit, (*TRUSTED_EXTENSIONS, *self.extensions))


@dataclass(frozen=True)
class Loaded:
    """A job's trace, the cases that it selects, and how they are run.

    Attributes
    ----------
    notes : what a user should know of the trace: what it lacks, values that cannot be had
    everything : all cases of the trace, where they had to be made
    unit : what the cases are made of
    ran : whether functions were run to load it, after which a fork of this process could hang
    """

    trace: Trace
    cases: list[Case]
    settings: Settings
    notes: list[str]
    everything: list[Case] | None = None
    unit: str = CALL
    ran: bool = False

    @cached_property
    def surroundings(self) -> Surroundings:
        """What stands around the cases' calls, where they are run amid it."""
        if self.settings.cache != PROGRAM or self.unit != CALL:
            return Surroundings({}, {})
        return make_surroundings(self.trace, self.everything)


def recorded_device(trace: Trace) -> str:
    """The device that most of a trace's tensors are on that are not on the CPU; `cpu` where all are."""
    devices = Counter(
        spec.device for signature in trace.signatures for spec in tensors([signature.args, signature.kwargs])
    )
    del devices["cpu"]
    return devices.most_common(1)[0][0] if devices else "cpu"
