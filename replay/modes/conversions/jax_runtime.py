"""Settings of jax, how tensors come to it, and names of devices in other runtimes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opgrip.errors import one_line
from opgrip.platform.precisions import allows_tf32
from opgrip.replay.modes.mode import Task
from opgrip.replay.operators.admission import Unsupported


def device_index(device: str) -> int:
    """The number of a device among those of its kind: of torch's current one where the name has none."""
    place = torch.device(device)
    index: int | None = place.index
    if index is None:
        return 0 if place.type == "cpu" else int(torch.get_device_module(place).current_device())
    return index


VALUES_NEEDED = ("ConcretizationTypeError", "TracerBoolConversionError", "NonConcreteBooleanIndexError")
"""What jax raises where the shape of something hangs on values, by the ends of the classes' names."""

THREADS = "NPROC"
"""Variable of the environment that says how many threads XLA starts on the CPU, once in a process."""

PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
"""Variable of the environment that says whether XLA takes a GPU's memory when it starts there."""

RANDOM = "get_and_rotate_prng_key"
"""What torchax lacks outside of its own environment."""


def start(task: Task) -> Any:
    """The device of jax that a task runs on, with its platform, threads, precision and cache set.

    Raises
    ------
    Unsupported : where XLA runs already, with another number of threads, or cannot start on that device
    """
    place = torch.device(task.device)
    _set_platform(place)
    _set_threads(task.threads)
    import jax

    # else what torch has in 64 bits comes back in 32
    jax.config.update("jax_enable_x64", True)
    # on a GPU XLA rounds what it multiplies, unless told not to
    jax.config.update("jax_default_matmul_precision", None if allows_tf32("cuda.matmul") else "highest")
    _keep_in(task.store)
    try:
        return jax.devices(platform_of(place))[device_index(task.device)]
    except (RuntimeError, IndexError) as error:
        raise Unsupported(f"jax does not start on {task.device}: {one_line(error, 200)}") from error


def platform_of(place: torch.device) -> str:
    """What jax calls a kind of device."""
    return "rocm" if place.type == "cuda" and torch.version.hip else place.type


def _set_platform(place: torch.device) -> None:
    """Have jax start on the device alone, and take memory of it as it needs that.

    Else it starts on any GPU that there is, and takes three quarters of its memory, which torch and others have too.
    """
    platform = platform_of(place)
    platforms = platform if platform == "cpu" else f"{platform},cpu"
    os.environ.setdefault(PREALLOCATE, "false")
    import jax
    from jax._src import xla_bridge

    if not xla_bridge.backends_are_initialized():
        jax.config.update("jax_platforms", platforms)


def to_jax(tensor: Tensor, device: Any) -> Any:
    """A tensor as jax takes it, in the same memory where that is contiguous and aligned."""
    import jax

    array = jax.numpy.from_dlpack(tensor.detach().resolve_conj().resolve_neg().contiguous())
    return jax.device_put(array, device)


def to_torch(array: Any) -> Tensor:
    """A result of jax, in the same memory."""
    tensor: Tensor = torch.utils.dlpack.from_dlpack(array)
    return tensor


def reason(error: Exception) -> str:
    """What an error of torchax or jax says, without the places of its own code and the advice."""
    if type(error).__name__ in VALUES_NEEDED:
        return "shapes in it hang on values"
    if RANDOM in str(error):
        return "it draws random numbers"
    lines = str(error).strip().splitlines()
    if isinstance(error, AssertionError) and lines and lines[0].startswith("aten."):
        return f"no function for {lines[0]}"
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else one_line(error)


def _set_threads(threads: int) -> None:
    """Have XLA start so many threads on the CPU."""
    from jax._src import xla_bridge

    if not xla_bridge.backends_are_initialized():
        os.environ[THREADS] = str(threads)
    elif os.environ.get(THREADS) != str(threads):
        started = os.environ.get(THREADS, "other")
        raise Unsupported(f"XLA has {started} threads in this process and cannot change to {threads}")


def _keep_in(folder: Path | None) -> None:
    """Have jax keep what it compiles in a folder, however fast it did; None to keep nothing."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    cache_folder = None if folder is None else str(folder)
    if jax.config.jax_compilation_cache_dir == cache_folder:
        return
    jax.config.update("jax_compilation_cache_dir", cache_folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # else it stays with the folder that it opened first
    compilation_cache.reset_cache()
