"""Environment of results: the machine, software versions, and environment variables that affect speed."""

from __future__ import annotations

import os
import platform
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from opgrip.platform.machine import lines, processor
from opgrip.replay.results.origins import machine_name

FREQUENCY = Path("/sys/devices/system/cpu/cpu0/cpufreq")
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
"""packages whose versions affect results; missing packages are left out"""
VARIABLES = re.compile(
    r"(OMP|MKL|KMP|GOMP|ONEDNN|DNNL|ATEN|TORCHINDUCTOR|TORCH_COMPILE|CUDA|PYTORCH|MALLOC)_|LD_PRELOAD"
)
"""names of environment variables that affect speed"""


def describe_environment(device: str) -> dict[str, Any]:
    """Return facts about the machine, its clocks and governor, versions, and variables that affect speed.

    Parameters
    ----------
    device : device of the results; facts about an accelerator are elsewhere in the header
    """
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
    found = []
    for name in PACKAGES:
        try:
            found.append((name, metadata.version(name)))
        except metadata.PackageNotFoundError:  # noqa: PERF203 - a dozen
            continue
    return found


def _line(path: Path) -> str | None:
    return next(iter(lines(str(path))), None)


def _mhz(path: Path) -> float | None:
    text = _line(path)
    return int(text) / 1e3 if text and text.isdigit() else None


def _cpuinfo_mhz() -> float | None:
    clocks = [line.split(":", 1)[1] for line in lines("/proc/cpuinfo") if line.startswith("cpu MHz")]
    return float(clocks[0]) if clocks else None
