"""Calls as functions of tensors, the start of jax, and conversion of tensors and devices for other runtimes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import torch
from torch import Tensor, nn

from opgrip.errors import one_line
from opgrip.platform.precisions import allows_tf32
from opgrip.replay.modes import Program, RunOutputs, Task
from opgrip.replay.operators.admission import Unsupported
from opgrip.replay.operators.devices import synchronizer
from opgrip.replay.operators.memory import Arguments, Function, tensors_in
from opgrip.traces.schema.arguments import map_leaves

ALIGNMENT = 64  # alignment of data in bytes that the compiled code of other runtimes assumes
COPIES = 3  # number of copies that are made to time one


def device_index(device: str) -> int:
    place = torch.device(device)
    index: int | None = place.index
    if index is None:
        return 0 if place.type == "cpu" else int(torch.get_device_module(place).current_device())
    return index


# class names of jax errors that are raised if shapes depend on values
VALUES_NEEDED = ("ConcretizationTypeError", "TracerBoolConversionError", "NonConcreteBooleanIndexError")

THREADS = "NPROC"  # environment variable for XLA's threads on the CPU, read once per process

# environment variable that controls whether XLA preallocates a GPU's memory
PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"

# text in torchax's error message for random numbers that are drawn outside of torchax's environment
RANDOM = "get_and_rotate_prng_key"


def start(task: Task) -> Any:
    place = torch.device(task.device)
    _set_platform(place)
    _set_threads(task.threads)
    import jax

    # otherwise jax returns 64-bit results in 32 bits
    jax.config.update("jax_enable_x64", True)
    # by default XLA rounds the factors of products on a GPU
    jax.config.update("jax_default_matmul_precision", None if allows_tf32("cuda.matmul") else "highest")
    _keep_in(task.store)
    try:
        return jax.devices(platform_of(place))[device_index(task.device)]
    except (RuntimeError, IndexError) as error:
        raise Unsupported(f"jax does not start on {task.device}: {one_line(error, 200)}") from error


def platform_of(place: torch.device) -> str:
    return "rocm" if place.type == "cuda" and torch.version.hip else place.type


def _set_platform(place: torch.device) -> None:
    platform = platform_of(place)
    platforms = platform if platform == "cpu" else f"{platform},cpu"
    os.environ.setdefault(PREALLOCATE, "false")
    import jax
    from jax._src import xla_bridge

    if not xla_bridge.backends_are_initialized():
        jax.config.update("jax_platforms", platforms)


def to_jax(tensor: Tensor, device: Any) -> Any:
    import jax

    return jax.device_put(jax.numpy.from_dlpack(plain(tensor)), device)


def plain(tensor: Tensor, alignment: int = ALIGNMENT) -> Tensor:
    """Return a tensor as other runtimes need it, contiguous and aligned: itself, or a copy."""
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return tensor.clone() if tensor.data_ptr() % alignment else tensor


def copied_in_runs(task: Task, alignment: int = ALIGNMENT) -> tuple[frozenset[int], str]:
    """Return the indices of tensors that are copied in each run, and a note on all copies that a runtime needs."""
    wait = synchronizer(task.device)
    in_runs, notes = set[int](), []
    for place, tensor in enumerate(tensors_in([task.args, task.kwargs])):
        times_ns = []
        for _ in range(COPIES):
            began = perf_counter_ns()
            copy = plain(tensor, alignment)
            wait()
            times_ns.append(perf_counter_ns() - began)
        if copy.data_ptr() == tensor.data_ptr():
            continue
        is_weight = place in task.weights
        in_runs.update(() if is_weight else (place,))
        when = "once" if is_weight else "in each run"
        size = f"{copy.nbytes:,} bytes in {min(times_ns) / 1e3:,.0f} us"
        notes.append(f"tensor {place + 1} copied {when}: {size}")
    return frozenset(in_runs), "; ".join(notes)


def runtime_program(
    task: Task,
    call: TensorCall,
    run: Function,
    to_runtime: Callable[[Tensor], Any],
    from_runtime: Callable[[Any], Tensor],
    prepare: Callable[[], object] = lambda: None,
    note: str = "",
) -> Program:
    """Return a program that converts tensors before its runs, except those that must be copied in each run."""
    in_runs, copies = copied_in_runs(task)

    def enter(arguments: Arguments) -> Arguments:
        prepare()
        tensors = enumerate(call.enter(arguments)[0])
        return tuple(tensor if place in in_runs else to_runtime(tensor) for place, tensor in tensors), {}

    def run_on_copies(*tensors: Any) -> Any:
        return run(*(to_runtime(item) if place in in_runs else item for place, item in enumerate(tensors)))

    def leave(outputs: Any) -> RunOutputs:
        return call.leave([from_runtime(output) for output in outputs])

    function = run_on_copies if in_runs else run
    function(*enter((task.args, task.kwargs))[0])
    return Program(function, enter, leave, note="; ".join(filter(None, (note, copies))))


def to_torch(array: Any) -> Tensor:
    tensor: Tensor = torch.utils.dlpack.from_dlpack(array)
    return tensor


def reason(error: Exception) -> str:
    if type(error).__name__ in VALUES_NEEDED:
        return "shapes in it depend on values"
    if RANDOM in str(error):
        return "it draws random numbers"
    lines = str(error).strip().splitlines()
    if isinstance(error, AssertionError) and lines and lines[0].startswith("aten."):
        return f"no function for {lines[0]}"
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else one_line(error)


def _set_threads(threads: int) -> None:
    from jax._src import xla_bridge

    if not xla_bridge.backends_are_initialized():
        os.environ[THREADS] = str(threads)
    elif os.environ.get(THREADS) != str(threads):
        started = os.environ.get(THREADS, "another number of")
        raise Unsupported(f"XLA already runs with {started} threads in this process and cannot change to {threads}")


def _keep_in(folder: Path | None) -> None:
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    cache_folder = None if folder is None else str(folder)
    if jax.config.jax_compilation_cache_dir == cache_folder:
        return
    jax.config.update("jax_compilation_cache_dir", cache_folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # otherwise jax keeps using the folder that it opened first
    compilation_cache.reset_cache()


class TensorCall(nn.Module):
    """A call as a torch module: its inputs are the call's tensors, and all other arguments are constants."""

    def __init__(self, task: Task, in_place: bool = False) -> None:
        super().__init__()
        self._function = task.function
        self._mutates = task.mutates
        self._copies = task.mutates and not in_place
        self._args, self._kwargs = task.args, task.kwargs
        self._results = 0

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        inputs = [tensor.clone() for tensor in tensors] if self._copies else list(tensors)
        remaining_inputs = iter(inputs)

        def build(leaf: Any) -> Any:
            return next(remaining_inputs) if isinstance(leaf, Tensor) else leaf

        args, kwargs = map_leaves(build, self._args), map_leaves(build, self._kwargs)
        results = tensors_in(self._function(*args, **kwargs))
        self._results = len(results)
        return (*results, *(inputs if self._mutates else ()))

    def enter(self, arguments: Arguments) -> Arguments:
        return tuple(tensors_in(list(arguments))), {}

    def leave(self, tensors: Sequence[Tensor]) -> RunOutputs:
        return RunOutputs(list(tensors[: self._results]), list(tensors[self._results :]))


def exported(task: Task, in_place: bool = False) -> tuple[torch.export.ExportedProgram, TensorCall]:
    """Return the program that torch.export makes from a call, and the module that was exported."""
    call = TensorCall(task, in_place)
    tensors = tensors_in([task.args, task.kwargs])
    if not tensors:
        raise Unsupported("none of its arguments is or contains a tensor")
    if task.mutates and len({tensor.untyped_storage()._cdata for tensor in tensors}) < len(tensors):
        raise Unsupported("it writes into memory that its arguments share")
    with torch.no_grad():
        program = torch.export.export(call, tuple(tensors))
        # running the call records how many of the tensors are results
        call(*tensors)
    if not program.graph_signature.user_outputs:
        raise Unsupported("it returns no tensor")
    return program, call
