"""The request of a user: which cases to replay and how, as plain data."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from opgrip.cli.command import InvalidValueError, positive
from opgrip.cli.option_types import byte_count, seconds
from opgrip.cli.options import EFFORT, option, titled
from opgrip.errors import UserError
from opgrip.replay.cases.selection import PointOptions, Selection
from opgrip.replay.inputs.input_options import InputOptions
from opgrip.replay.modes import ModeOptions, Tuning
from opgrip.replay.modes.candidate import CandidateOptions
from opgrip.replay.run.checks.verdicts import Tolerance
from opgrip.replay.run.energy import EnergyOptions
from opgrip.replay.timing.timing_options import Effort, TimingOptions

AUTO = "auto"
MOST_SHARDS = 1_000_000
# placeholder for the shard's number in the name of an output, so that processes with the same command line write
# separate files
PLACEHOLDER = "{shard}"


@dataclass(frozen=True, slots=True)
class Shard:
    """One of several equal parts of a replay, such as 3/16.

    number : number of the shard, counted from 1
    """

    number: int
    count: int
    offset_us: int = 0
    total_us: int | None = None

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @property
    def slug(self) -> str:
        """Text that represents the shard in file names, such as `03-of-16`."""
        return f"{self.number:0{len(str(self.count))}d}-of-{self.count}"

    def bounds_us(self, total_us: int) -> tuple[int, int]:
        return total_us * (self.number - 1) // self.count, total_us * self.number // self.count

    def has_part_of(self, cost_us: int) -> bool:
        assert self.total_us is not None, "it is known when several traces are divided"
        begin, end = self.bounds_us(self.total_us)
        return self.offset_us < end and self.offset_us + cost_us > begin

    def select(self, costs_us: Sequence[int]) -> list[int]:
        """Return the indices of the cases that belong to this shard, given the costs of all cases."""
        begin, end = self.bounds_us(sum(costs_us) if self.total_us is None else self.total_us)
        places, start = [], self.offset_us
        for place, cost_us in enumerate(costs_us):
            if begin <= start + cost_us // 2 < end:
                places.append(place)
            start += cost_us
        return places


TORCH = "torch"  # key of the torch version in an identity


@titled("limits")
@dataclass(frozen=True, slots=True)
class RunLimits:
    timeout: float = option(
        120.0,
        "end a case if one run takes longer than this; with --sequence, if one call does (default: %(default)g)",
        parse=seconds,
        metavar="SECONDS",
        role=EFFORT,
    )
    memory_limit: int | None = option(
        None,
        "memory that each worker process may use for its cases, such as 8GB (default: the machine's free memory)",
        parse=byte_count,
        metavar="BYTES",
        role=EFFORT,
    )
    jobs: int | None = option(
        None,
        "number of cases to compile at once (default: one per processor, at most four on an accelerator)",
        parse=positive,
        only=("single cases",),
        role=EFFORT,
    )

    @property
    def compilers(self) -> int:
        return self.jobs or len(os.sched_getaffinity(0))


@dataclass(frozen=True, slots=True)
class RunRequest:
    """The cases to replay and how to run them, as plain values that can be sent to other processes.

    trace : path of the trace, or name of the samples or operators
    profiled : name of the profiler that records the timed runs, or empty
    """

    trace: str = ""
    selection: Selection = field(default_factory=Selection)
    shard: Shard | None = None
    inputs: InputOptions = field(default_factory=InputOptions)
    points: PointOptions = field(default_factory=PointOptions)
    modes: ModeOptions = field(default_factory=ModeOptions)
    tuning: Tuning = field(default_factory=Tuning)
    candidates: CandidateOptions = field(default_factory=CandidateOptions)
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
        return msgspec.convert(record, cls)


# option classes of a request, by field
OPTION_GROUPS: dict[str, Any] = {name: kind for name, kind in get_type_hints(RunRequest).items() if is_dataclass(kind)}


def identity(request: RunRequest) -> dict[str, Any]:
    from torch import __version__ as torch_version

    from opgrip.replay.cases.sources import source_of

    trace_hash = source_of(request.trace).fingerprint(request.trace)
    same = {"trace": trace_hash, "options": identifying_options(request), TORCH: str(torch_version)}
    return same if request.shard is None else {**same, "shard": asdict(request.shard)}


def identifying_options(request: RunRequest) -> dict[str, Any]:
    options: dict[str, Any] = json.loads(json.dumps(asdict(replace(request, limits=RunLimits(), store=None))))
    del options["trace"], options["shard"], options["sandbox"]
    return options


def options_hash(request: RunRequest) -> str:
    """Return a hash of the options that affect the rows, without `--pin`, which may differ between shards."""
    options = identifying_options(replace(request, points=replace(request.points, pin=())))
    return hashlib.blake2b(json.dumps(options, sort_keys=True).encode(), digest_size=8).hexdigest()


def settle_shard(part: Shard | None, output: Path | None) -> Path | None:
    """Return the output of a shard, and let the process of a shard use its own accelerator."""
    if part is None:
        if output is not None and PLACEHOLDER in output.name:
            raise UserError(
                f"{PLACEHOLDER} in the name of {output} is a placeholder for the number of a shard", "add --shard"
            )
        return output
    local, visible = os.environ.get("LOCAL_RANK", ""), os.environ.get("CUDA_VISIBLE_DEVICES")
    if "TORCHELASTIC_RUN_ID" in os.environ and local.isdigit():
        devices = visible.split(",") if visible else []
        os.environ["CUDA_VISIBLE_DEVICES"] = devices[int(local) % len(devices)] if devices else local
    return None if output is None else output.with_name(output.name.replace(PLACEHOLDER, part.slug))


def shard(text: str) -> Shard:
    if text == AUTO:
        return shard_of_environment(os.environ)
    match = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text)
    if match is None:
        raise InvalidValueError(f"{text!r} is neither a shard such as 3/16 nor auto")
    return _checked(int(match[1]), int(match[2]), text)


def shard_of_environment(variables: Mapping[str, str]) -> Shard:
    """Return the shard of a process that torchrun, Slurm or Open MPI started, from its environment variables."""
    torchrun, mpi = ("RANK", "WORLD_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    # a batch script knows the number of tasks of its job but is not a task itself; only steps set the task's number
    step, array = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"), "SLURM_ARRAY_TASK_ID"
    if all(name in variables for name in torchrun):
        number, count = (_whole(variables, name) for name in torchrun)
    elif array in variables or all(name in variables for name in step):
        number, count = _place_in_array(variables) if array in variables else (0, 1)
        if all(name in variables for name in step):
            process, processes = (_whole(variables, name) for name in step)
            number, count = number * processes + process, count * processes
    elif all(name in variables for name in mpi):
        number, count = (_whole(variables, name) for name in mpi)
    else:
        raise InvalidValueError(
            "neither torchrun nor Slurm nor Open MPI started this process: give a shard such as 3/16"
        )
    return _checked(number + 1, count, f"{number + 1}/{count}")


def _place_in_array(variables: Mapping[str, str]) -> tuple[int, int]:
    names = (f"SLURM_ARRAY_TASK_{name}" for name in ("ID", "MIN", "MAX", "COUNT"))
    task, first, last, count = (_whole(variables, name) for name in names)
    step = _whole(variables, "SLURM_ARRAY_TASK_STEP") if "SLURM_ARRAY_TASK_STEP" in variables else 1
    if step < 1 or (last - first) // step + 1 != count:
        raise InvalidValueError("the numbers of the job array have gaps: give a shard such as 3/16")
    return (task - first) // step, count


def _whole(variables: Mapping[str, str], name: str) -> int:
    text = variables.get(name, "")
    if re.fullmatch(r"[0-9]{1,9}", text) is None:
        raise InvalidValueError(f"${name} is {text!r}, not a number")
    return int(text)


def _checked(number: int, count: int, text: str) -> Shard:
    if not 1 <= number <= count <= MOST_SHARDS:
        count = min(max(count, 1), MOST_SHARDS)
        shards = f"of {count} the first is 1/{count}, the last {count}/{count}"
        raise InvalidValueError(f"shard {text} does not exist: {shards}")
    return Shard(number, count)
