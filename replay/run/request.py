"""The request of a user, as plain data.

A `RunRequest` is created from the options once. Worker processes receive it, profiled processes read it, and the
journal compares it when an interrupted replay resumes. A `Workload` (`replay/run/workload.py`) is the request applied
to one trace on one device.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from typing import Any, get_type_hints

from opgrip.cli.command import positive
from opgrip.cli.option_types import byte_count, seconds
from opgrip.cli.options import EFFORT, from_plain, option, titled
from opgrip.replay.cases.selection import Selection
from opgrip.replay.cases.variants import PointOptions
from opgrip.replay.checks.verdicts import Tolerance
from opgrip.replay.inputs.input_options import InputOptions
from opgrip.replay.modes import ModeOptions, Tuning
from opgrip.replay.run.energy import EnergyOptions
from opgrip.replay.run.shards import Shard
from opgrip.replay.timing.timing_options import Effort, TimingOptions

TORCH = "torch"
"""key of the torch version in an identity"""


@titled("limits")
@dataclass(frozen=True, slots=True)
class RunLimits:
    """Limits of time, memory and processes."""

    timeout: float = option(
        120.0,
        "end a case if one run takes longer; with --sequence, if one call does (default: %(default)g)",
        parse=seconds,
        metavar="SECONDS",
        role=EFFORT,
    )
    memory_limit: int | None = option(
        None,
        "memory limit for the cases, such as 8GB (default: the machine's free memory)",
        parse=byte_count,
        metavar="BYTES",
        role=EFFORT,
    )
    jobs: int | None = option(
        None,
        "number of cases to compile at once (default: one per processor, at most four on an accelerator)",
        parse=positive,
        metavar="N",
        only=("single cases",),
        role=EFFORT,
    )

    @property
    def compilers(self) -> int:
        """Number of cases that compile at once."""
        return self.jobs or len(os.sched_getaffinity(0))


@dataclass(frozen=True, slots=True)
class RunRequest:
    """The cases to replay and how to run them, in plain values.

    trace : path of the trace, or name of the samples or operators
    shard : part of the cases to replay, or None for all
    detail : keep the full text of an error instead of its first line
    store : folder for compiled programs, or None to keep none
    profiled : name of the profiler that records the timed runs; it needs worker processes that exit by themselves
    timelines : folder for the timelines of torch's profiler
    count_work : run each subgraph case and sample once more to count the work of its operators
    sandbox : run workers in bubblewrap
    """

    trace: str = ""
    selection: Selection = field(default_factory=Selection)
    shard: Shard | None = None
    inputs: InputOptions = field(default_factory=InputOptions)
    points: PointOptions = field(default_factory=PointOptions)
    modes: ModeOptions = field(default_factory=ModeOptions)
    tuning: Tuning = field(default_factory=Tuning)
    tolerance: Tolerance = field(default_factory=Tolerance)
    timing: TimingOptions = field(default_factory=TimingOptions)
    effort: Effort = field(default_factory=Effort)
    energy: EnergyOptions = field(default_factory=EnergyOptions)
    limits: RunLimits = field(default_factory=RunLimits)
    detail: bool = False
    store: str | None = None
    profiled: str = ""
    timelines: str | None = None
    count_work: bool = False
    sandbox: bool = False

    @classmethod
    def from_plain(cls, record: Mapping[str, Any]) -> RunRequest:
        """Return the request from a record of `dataclasses.asdict`, which may have passed through JSON."""
        groups: dict[str, Any] = {name: from_plain(group, record[name]) for name, group in OPTION_GROUPS.items()}
        shard = None if record["shard"] is None else Shard(**record["shard"])
        return cls(**{**record, **groups, "shard": shard})


OPTION_GROUPS: dict[str, Any] = {name: kind for name, kind in get_type_hints(RunRequest).items() if is_dataclass(kind)}
"""option classes of a request, by field"""


def identity(request: RunRequest) -> dict[str, Any]:
    """Return the facts that two replays must share for their rows to belong in one table."""
    from torch import __version__ as torch_version

    from opgrip.replay.cases.sources import source_of

    trace_hash = source_of(request.trace).fingerprint(request.trace)
    same = {"trace": trace_hash, "options": identifying_options(request), TORCH: str(torch_version)}
    return same if request.shard is None else {**same, "shard": asdict(request.shard)}


def identifying_options(request: RunRequest) -> dict[str, Any]:
    """Return the options that affect the rows of a replay, in the form that JSON returns."""
    options: dict[str, Any] = json.loads(json.dumps(asdict(replace(request, limits=RunLimits(), store=None))))
    del options["trace"], options["shard"], options["sandbox"]
    return options


def options_hash(request: RunRequest) -> str:
    """Return a hash of the options that affect rows; shards pinned to different processors share it."""
    options = identifying_options(replace(request, points=replace(request.points, pin=())))
    return hashlib.blake2b(json.dumps(options, sort_keys=True).encode(), digest_size=8).hexdigest()
