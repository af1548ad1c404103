"""The settings of torch that change how an operator runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from opgrip.capture.program.accelerators import accelerators, is_started
from opgrip.errors import raise_if_from_program
from opgrip.platform.precisions import describe_precisions
from opgrip.traces.schema.tensor_specs import plain_name

MODES: dict[str, Callable[[], Any]] = {
    "grad": torch.is_grad_enabled,
    "inference": torch.is_inference_mode_enabled,
}
"""Those that a program changes all the time."""

SETTINGS: dict[str, Callable[[], Any]] = {
    "deterministic": torch.are_deterministic_algorithms_enabled,
    "deterministic_warn_only": torch.is_deterministic_algorithms_warn_only_enabled,
    "matmul_precision": torch.get_float32_matmul_precision,
    "fp32_precision": describe_precisions,
    "threads": torch.get_num_threads,
    "default_dtype": torch.get_default_dtype,
}
"""Those that it seldom changes. Autocast is not among them: it is off below the dispatcher, where calls are seen."""

CUDA_SETTINGS: dict[str, Callable[[], Any]] = {
    "cudnn": lambda: torch.backends.cudnn.enabled,
    "cudnn_benchmark": lambda: torch.backends.cudnn.benchmark,
    "cudnn_deterministic": lambda: torch.backends.cudnn.deterministic,
    "cudnn_tf32": lambda: torch.backends.cudnn.allow_tf32,
    "stream": lambda: torch.cuda.current_stream().stream_id,
}
"""Those that are read once the program has started CUDA."""


def read_context() -> tuple[Any, ...]:
    """The values of all modes and settings, in the order of the tables."""
    return (*[read() for read in MODES.values()], *read_settings())


def read_settings() -> tuple[Any, ...]:
    """The values of all settings, in the order of the tables; None for those that cannot be read."""
    values = [_read(read) for read in SETTINGS.values()]
    if is_started("cuda"):
        values += [_read(read) for read in CUDA_SETTINGS.values()]
    return tuple(values)


def describe_context(values: tuple[Any, ...]) -> dict[str, Any]:
    """What `read_context` gave, by name, without what could not be read."""
    described = zip((*MODES, *SETTINGS, *CUDA_SETTINGS), values, strict=False)
    return {
        name: plain_name(value) if isinstance(value, torch.dtype) else value
        for name, value in described
        if value is not None
    }


def describe_autocast() -> str:
    """The device types that autocast is on for in this thread, each with its dtype, such as `cpu:bfloat16`."""
    on = [device for device in ("cpu", *accelerators()) if torch.is_autocast_enabled(device)]
    return ",".join(f"{device}:{str(torch.get_autocast_dtype(device)).removeprefix('torch.')}" for device in on)


def _read(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except (RuntimeError, AttributeError) as error:
        raise_if_from_program(error)
        return None
