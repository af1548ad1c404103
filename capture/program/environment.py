"""Description of the machine and the program, for the header of a trace."""

from __future__ import annotations

import functools
import os
import platform
import resource
import sys
from collections.abc import Callable
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from opgrip.capture.program.accelerators import accelerators, describe_devices, is_started, started_devices
from opgrip.capture.program.processes import rank
from opgrip.errors import raise_if_from_program
from opgrip.platform.machine import describe_processors
from opgrip.platform.precisions import (
    CUDA_FLAGS,
    HOST_FLAGS,
    describe_precisions,
    flag_reader,
    flag_text,
    flushes_denormals,
)
from opgrip.traces.schema.tensor_specs import plain_name
from opgrip.traces.table.accelerators import HOST_VARIABLES, describe_accelerators


def describe_environment() -> dict[str, Any]:
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
        "devices": {"cpu": describe_processors()} | describe_devices(),
        "threads": torch.get_num_threads(),
        "page_size": resource.getpagesize(),
        "environment": {name: os.environ[name] for name in HOST_VARIABLES if name in os.environ},
    }
    return ranks | fields | ({"accelerator": accelerator} if accelerator else {})


@functools.cache
def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


# functions that read settings which a program often changes
MODES: dict[str, Callable[[], Any]] = {"grad": torch.is_grad_enabled, "inference": torch.is_inference_mode_enabled}

# functions that read settings which a program rarely changes; autocast is off where calls are recorded
SETTINGS: dict[str, Callable[[], Any]] = {
    "deterministic": torch.are_deterministic_algorithms_enabled,
    "deterministic_warn_only": torch.is_deterministic_algorithms_warn_only_enabled,
    "matmul_precision": torch.get_float32_matmul_precision,
    "fp32_precision": describe_precisions,
    "threads": torch.get_num_threads,
    "default_dtype": torch.get_default_dtype,
    "flush_denormal": flushes_denormals,
    **{name: flag_reader(suffix) for name, suffix in HOST_FLAGS.items()},
}

# functions that read settings once the program uses CUDA
CUDA_SETTINGS: dict[str, Callable[[], Any]] = {
    **{name: flag_reader(suffix) for name, suffix in CUDA_FLAGS.items() if hasattr(torch._C, f"_get_{suffix}")},
    "stream": lambda: torch.cuda.current_stream().stream_id,
}


def read_context() -> tuple[Any, ...]:
    return (*[read() for read in MODES.values()], *read_settings())


def read_settings() -> tuple[Any, ...]:
    values = [_read(read) for read in SETTINGS.values()]
    if is_started("cuda"):
        values += [_read(read) for read in CUDA_SETTINGS.values()]
    return tuple(values)


def describe_context(values: tuple[Any, ...]) -> dict[str, Any]:
    described = zip((*MODES, *SETTINGS, *CUDA_SETTINGS), values, strict=False)
    return {
        name: plain_name(value) if isinstance(value, torch.dtype) else flag_text(value)
        for name, value in described
        if value is not None
    }


def describe_autocast() -> str:
    """Return the device types for which autocast is on in this thread, each with its dtype, such as `cpu:bfloat16`."""
    on = [device for device in ("cpu", *accelerators()) if torch.is_autocast_enabled(device)]
    return ",".join(f"{device}:{str(torch.get_autocast_dtype(device)).removeprefix('torch.')}" for device in on)


def _read(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except (RuntimeError, AttributeError) as error:
        raise_if_from_program(error)
        return None
