"""Origin of results: machine, software versions, environment variables that affect speed, and the traced model."""

from __future__ import annotations

import os
import platform
import re
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from opgrip.platform.machine import lines, processor
from opgrip.replay.results.columns import Columns, column
from opgrip.replay.results.results import Result

# environment variable that names the machine if its host name is meaningless, as in a container
MACHINE = "OPGRIP_MACHINE"
_NAMED = 3  # number of machines that a header lists by name


@dataclass(frozen=True, slots=True)
class MachineColumns(Columns):
    machine: str | None = column("name of the machine that measured the row: `$OPGRIP_MACHINE`, or the host name")
    machine_kind: str | None = column("kind of that machine, such as its accelerator; only rows of one kind are merged")


@dataclass(frozen=True, slots=True)
class Machine:
    name: str
    kind: str  # accelerator, processor, and number of processors that the replay may use

    def marked(self, row: Result) -> Result:
        return row.adding(MachineColumns(self.name, self.kind))


def names_of(machines: Iterable[str]) -> str:
    names = sorted(machines)
    named = ", ".join(names[:_NAMED])
    return named if len(names) <= _NAMED else f"{named} and {len(names) - _NAMED} more"


def machine_name() -> str:
    return os.environ.get(MACHINE) or socket.gethostname() or "machine"


def this_machine(device: str) -> Machine:
    parts = [" ".join(processor("cpu")[1:]).strip() or "a processor", f"{len(os.sched_getaffinity(0))} of them"]
    if device not in ("cpu", "meta"):
        parts.insert(0, processor(device)[0])
    return Machine(machine_name(), ", ".join(parts))


@dataclass(frozen=True, slots=True)
class OriginColumns(Columns):
    model: str | None = column("model of which the trace is a run")
    run: str | None = column("kind of step, such as `predict` or `train`")
    library: str | None = column("library of the model, if the zoo's manifest contains it")
    family: str | None = column("kind of model, if the zoo's manifest contains it")


@dataclass(frozen=True, slots=True)
class Origin:
    trace: str  # unique name
    model: str
    run: str = ""  # kind of step, such as `predict`
    library: str = ""
    family: str = ""

    def marked(self, row: Result) -> Result:
        about = OriginColumns(self.model, self.run or None, self.library or None, self.family or None)
        return replace(row.adding(about), trace=self.trace)


def origin_in(trace: str, about: Mapping[str, Any]) -> Origin:
    words = {word: str(about.get(word) or "") for word in ("run", "library", "family")}
    return Origin(trace, str(about.get("model") or trace), **words)


def origin_of(row: Result) -> Origin:
    about = OriginColumns.of(row)
    return Origin(row.trace, about.model or row.trace, about.run or "", about.library or "", about.family or "")


FREQUENCY = Path("/sys/devices/system/cpu/cpu0/cpufreq")
# packages whose versions affect results; missing packages are left out
PACKAGES = (
    "opgrip",
    "torch",
    "numpy",
    "torchvision",
    "mmcv",
    "onnxruntime",
    "jax",
    "torchax",
    "tensorflow",
    "apache-tvm",
)
# pattern of the names of environment variables that affect speed
VARIABLES = re.compile(
    r"(OMP|MKL|KMP|GOMP|ONEDNN|DNNL|ATEN|TORCHINDUCTOR|TORCH_COMPILE|CUDA|PYTORCH|MALLOC)_|LD_PRELOAD"
)


def describe_environment(device: str) -> dict[str, Any]:
    import torch

    facts = {
        "machine": machine_name(),
        "system": platform.platform(),
        "processor": " ".join(processor("cpu")[1:]).strip(),
        "processors": len(os.sched_getaffinity(0)),
        "governor": _line(FREQUENCY / "scaling_governor"),
        "max_mhz": _mhz(FREQUENCY / "cpuinfo_max_freq"),
        "mhz": _mhz(FREQUENCY / "scaling_cur_freq") or _cpuinfo_mhz(),
        "load": round(os.getloadavg()[0], 2),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": {**dict(_versions()), "torch": torch.__version__},
        "variables": {name: value for name, value in sorted(os.environ.items()) if VARIABLES.match(name)},
    }
    return {name: value for name, value in facts.items() if value not in (None, "", {})}


def _versions() -> list[tuple[str, str]]:
    versions = []
    for name in PACKAGES:
        try:
            versions.append((name, metadata.version(name)))
        except metadata.PackageNotFoundError:  # noqa: PERF203 - a dozen
            continue
    return versions


def _line(path: Path) -> str | None:
    return next(iter(lines(str(path))), None)


def _mhz(path: Path) -> float | None:
    text = _line(path)
    return int(text) / 1e3 if text and text.isdigit() else None


def _cpuinfo_mhz() -> float | None:
    clocks = [line.split(":", 1)[1] for line in lines("/proc/cpuinfo") if line.startswith("cpu MHz")]
    return float(clocks[0]) if clocks else None
