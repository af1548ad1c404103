"""What a trace says about the machine and the program that it was made by."""

from __future__ import annotations

import os
import platform
import resource
import sys
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from opgrip.capture.program.accelerators import describe_devices, started_devices
from opgrip.capture.program.ranks import rank
from opgrip.traces.table.accelerators import describe_accelerators


def describe_environment() -> dict[str, Any]:
    """Fields of a trace's header: versions, command, devices, settings, time."""
    number = rank()
    ranks = {} if number is None else {"rank": number, "world_size": int(os.environ["WORLD_SIZE"])}
    accelerator = describe_accelerators(started_devices())
    fields = {
        "opgrip": _version("opgrip"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]] if sys.argv else [],
        "pid": os.getpid(),
        "devices": {"cpu": _cpu_name()} | describe_devices(),
        "threads": torch.get_num_threads(),
        "page_size": resource.getpagesize(),
    }
    return ranks | fields | ({"accelerator": accelerator} if accelerator else {})


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} logical cores"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
