"""XLA: the exported call as a function of jax, by torchax, compiled for this CPU or GPU.

Torchax is taken rather than torch_xla, which is built for one version of torch each.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._ops import OpOverloadPacket

from opgrip.replay.modes.graphs import exported
from opgrip.replay.modes.mode import Program, Results, Task, mode
from opgrip.replay.operators import Unsupported
from opgrip.replay.timing.methods import Arguments
from opgrip.traces.errors import one_line

THREADS = "NPROC"
"""Variable of the environment that says how many threads XLA's CPU client starts, once in a process."""


@mode("xla", needs=("torchax", "jax"), extra="xla")
def make(task: Task) -> Program:
    """A call compiled by XLA."""
    on_cpu = torch.device(task.device).type == "cpu"
    if on_cpu:
        _set_threads(task.threads)
    import jax

    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_default_matmul_precision", None if _may_round() else "highest")
    if task.store is not None:
        _keep_in(str(task.store))
    program, call = exported(task)
    states, function = _converted(program)
    # sets how many of the tensors are results
    call(*call.enter((task.args, task.kwargs))[0])
    compiled = jax.jit(lambda *given: function(states, given))

    def enter(arguments: Arguments) -> Arguments:
        return tuple(_given(tensor) for tensor in call.enter(arguments)[0]), {}

    def run(*given: Any) -> Any:
        return jax.block_until_ready(compiled(*given))

    def leave(given: Any) -> Results:
        return call.leave([_taken(array) for array in given])

    try:
        run(*enter((task.args, task.kwargs))[0])
    except Exception as error:
        raise Unsupported(f"jax cannot run it: {_reason(error)}") from error
    return Program(run, enter, leave)


def _set_threads(threads: int) -> None:
    """Make XLA's client on the CPU start so many threads, which it does once.

    Raises
    ------
    Unsupported : where it runs already, with another number
    """
    from jax._src import xla_bridge

    if not xla_bridge.backends_are_initialized():
        os.environ[THREADS] = str(threads)
    elif os.environ.get(THREADS) != str(threads):
        started = os.environ.get(THREADS, "other")
        raise Unsupported(f"XLA runs in this process with {started} threads and cannot change to {threads}")


def _may_round() -> bool:
    """Whether torch may round what it multiplies, as XLA does by itself on a GPU."""
    return torch.backends.cuda.matmul.allow_tf32


def _keep_in(folder: str) -> None:
    """Keep what XLA compiles, however fast it did."""
    import jax
    from jax._src import compilation_cache

    if jax.config.jax_compilation_cache_dir == folder:
        return
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # else it keeps to the folder that it opened first
    compilation_cache.reset_cache()


@contextmanager
def _torch_as_torchax_needs_it() -> Iterator[None]:
    """Let torchax be imported, and undo what that changes in torch.

    Its tables name overloads that later versions of torch removed: a placeholder, which no program calls, stands in
    their place. It declares a backend of torch, which it needs for tensors that are not used here, replaces some
    decompositions, which other compilers would then take, and turns a fast path of attention off.
    """
    find = OpOverloadPacket.__getattr__

    def find_or_stand_in(packet: OpOverloadPacket, name: str) -> Any:
        try:
            return find(packet, name)
        except AttributeError:
            if name.startswith("__"):
                raise
            return object()

    tables = torch._decomp.global_decomposition_table
    kept = {kind: dict(table) for kind, table in tables.items()}
    fast = torch.backends.mha.get_fastpath_enabled()
    try:
        with ExitStack() as patches:
            patches.enter_context(patch.object(OpOverloadPacket, "__getattr__", find_or_stand_in))
            patches.enter_context(patch.object(torch.utils, "rename_privateuse1_backend"))
            patches.enter_context(patch.object(torch, "_register_device_module"))
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for kind, table in tables.items():
            table.clear()
            table.update(kept[kind])


def _converted(program: torch.export.ExportedProgram) -> tuple[Any, Callable[..., Any]]:
    """A program's constants, and a function of jax that takes them and the program's inputs."""
    with _torch_as_torchax_needs_it():
        import torchax
        import torchax.export

        # reads the tables
        torchax.default_env()
    try:
        states, function = torchax.export.exported_program_to_jax(program)
    except Exception as error:
        raise Unsupported(f"torchax cannot convert it: {_reason(error)}") from error
    return states, function


def _given(tensor: Tensor) -> Any:
    """A tensor as jax takes it, in the same memory where that is contiguous."""
    import jax

    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return jax.numpy.from_dlpack(tensor)


def _taken(array: Any) -> Tensor:
    return torch.from_dlpack(array)


def _reason(error: Exception) -> str:
    return one_line(error)
