"""A replay as plain data, which a worker process is told, and what it stands for."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from opgrip.cli.options import from_plain
from opgrip.replay.batch_scale.batch_scale import BatchScale
from opgrip.replay.cases.cases import Case
from opgrip.replay.cases.preceding_calls import PrecedingCalls, make_preceding_calls
from opgrip.replay.cases.selection import Selection
from opgrip.replay.cases.sources import NO_TRACE, CaseSet, source_of
from opgrip.replay.cases.unused_results import with_unused_results
from opgrip.replay.inputs.inputs import device_map
from opgrip.replay.modes import EAGER, find_mode
from opgrip.replay.operators.devices import with_index
from opgrip.replay.run.settings import GROUPS, Plan, Settings
from opgrip.replay.timing.timing_options import DISCRETE, EVENTS, PROGRAM
from opgrip.replay.workers.shards import Shard, take_shard
from opgrip.traces import Trace
from opgrip.traces.formats.building import says_gradients
from opgrip.traces.schema.arguments import tensors
from opgrip.traces.table.unconverted import unconverted


@dataclass(frozen=True, slots=True)
class Job:
    """What to replay, and how, in plain values.

    Attributes
    ----------
    trace : path of the trace, or the samples' name
    shard : the part of its cases that is replayed; None for all
    """

    trace: str
    selection: Selection = field(default_factory=Selection)
    plan: Plan = field(default_factory=Plan)
    shard: Shard | None = None

    @classmethod
    def from_plain(cls, record: Mapping[str, Any]) -> Job:
        """The job that `dataclasses.asdict` made a record of, which may have been through JSON."""
        groups: dict[str, Any] = {name: from_plain(group, record["plan"][name]) for name, group in GROUPS.items()}
        plan = Plan(**{**record["plan"], **groups})
        shard = None if record["shard"] is None else Shard(**record["shard"])
        return cls(record["trace"], from_plain(Selection, record["selection"]), plan, shard)

    def on(self, device: str) -> Job:
        """What a process is told that runs cases on one of its devices."""
        plan = self.plan
        if not plan.inputs.is_spread:
            return self
        return replace(self, plan=replace(plan, inputs=replace(plan.inputs, device=device)))

    def load(self) -> Loaded:
        """Its trace, cases and settings.

        Raises
        ------
        UserError : where the trace cannot be read, or nothing of it is selected
        """
        selection = self.selection
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            # what old versions of packages say of each other is not the user's
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.simplefilter("ignore", FutureWarning)
            source_cases = source_of(self.trace).open(self.trace, selection, self.plan.inputs.extensions)
        trace = source_cases.trace
        cases = source_cases.cases
        if not source_cases.is_cut:
            cases = [cases[place] for place in selection.places(len(cases))]
        if self.plan.modes.all_names != (EAGER,):
            cases = with_unused_results(cases, trace)
        notes = [note for note in (trace.missing, unconverted(trace)) if note]
        notes += dict.fromkeys(str(warning.message) for warning in caught)
        settings = settings_for(self.plan, trace)
        if self.shard is not None:
            cases = take_shard(cases, settings, self.shard)
        return Loaded(source_cases, cases, settings, notes)


@dataclass(frozen=True)
class Loaded:
    """A job's cases, and how they are run.

    Attributes
    ----------
    source_cases : what the cases are selected from
    notes : what a user should know of the trace: what it lacks, values that cannot be had
    """

    source_cases: CaseSet
    cases: list[Case]
    settings: Settings
    notes: list[str]

    @property
    def trace(self) -> Trace:
        """What the cases are of."""
        return self.source_cases.trace

    @property
    def devices(self) -> tuple[str, ...]:
        """That the cases run on: one, or several that they are spread over."""
        settings = self.settings
        return tuple(map(with_index, settings.inputs.devices)) if settings.inputs.is_spread else (settings.device,)

    def on(self, device: str) -> Loaded:
        """The same for one of its devices."""
        if not self.settings.inputs.is_spread:
            return self
        place = device_map(recorded_device(self.trace), device)
        return replace(self, settings=replace(self.settings, device=device, place=place))

    @cached_property
    def surroundings(self) -> PrecedingCalls:
        """What stands around the cases' calls, where they are run amid it."""
        if PROGRAM not in self.settings.timing.caches or not self.source_cases.are_calls:
            return PrecedingCalls({}, {})
        return make_preceding_calls(self.trace, self.source_cases.all_cases, self.source_cases.cases)


def settings_for(plan: Plan, trace: Trace = NO_TRACE) -> Settings:
    """What a plan means for a trace, or for cases of none."""
    recorded = recorded_device(trace)
    requested = next(map(with_index, plan.inputs.devices), None)
    device = requested or with_index(recorded)
    # what works on streams of its own is not seen by torch's clock, and is compared by one clock alone
    by_events = device not in ("cpu", "meta") and all(find_mode(name)[0].in_torch for name in plan.modes.all_names)
    same = {item.name: getattr(plan, item.name) for item in fields(plan)}
    return Settings(
        **same | {"timing": plan.timing.with_method(EVENTS if by_events else DISCRETE)},
        place=device_map(recorded, requested or _unsaid_device(trace, recorded)),
        device=device,
        adds_gradients=plan.timing.backward and not says_gradients(trace.header),
        batches=BatchScale(trace) if any(scale != 1 for scale in plan.points.batch_scale) else None,
    )


def _unsaid_device(trace: Trace, recorded: str) -> str | None:
    """The processor for a file of another tool whose tensors are there; arguments may name a device all the same.

    Such as a TritonBench file's `device='cuda'`, of tensors whose device the file does not say.
    """
    return "cpu" if recorded == "cpu" and "converted_from" in trace.header else None


def recorded_device(trace: Trace) -> str:
    """The device that most of a trace's tensors are on that are not on the CPU; `cpu` where all are."""
    devices = Counter(
        spec.device for signature in trace.signatures for spec in tensors([signature.args, signature.kwargs])
    )
    del devices["cpu"]
    return devices.most_common(1)[0][0] if devices else "cpu"
