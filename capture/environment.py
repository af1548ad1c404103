"""What a trace says about the machine and the program that it was made by."""

from __future__ import annotations

import os
import platform
import resource
import sys
import warnings
from contextlib import suppress
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from opgrip.capture.processes import rank


def describe_environment() -> dict[str, Any]:
    """Fields of a trace's header: versions, command, devices, settings, time."""
    number = rank()
    ranks = {} if number is None else {"rank": number, "world_size": int(os.environ["WORLD_SIZE"])}
    return ranks | {
        "opgrip": _version("opgrip"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]] if sys.argv else [],
        "pid": os.getpid(),
        "devices": _devices(),
        "threads": torch.get_num_threads(),
        "page_size": resource.getpagesize(),
    }


def _devices() -> dict[str, str]:
    devices = {"cpu": _cpu_name()}
    # that a driver is too old for this torch, or broken, is not said of a program that asks for no GPU
    with warnings.catch_warnings(), suppress(Exception):
        warnings.simplefilter("ignore")
        if torch.cuda.is_available():
            for index in range(torch.cuda.device_count()):
                devices[f"cuda:{index}"] = torch.cuda.get_device_name(index)
    return devices


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
