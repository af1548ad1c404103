"""XLA: the exported call as a function of jax, by torchax, compiled for this CPU or GPU.

Torchax is taken rather than torch_xla, each version of which works with one version of torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opgrip.replay.modes.graphs import exported
from opgrip.replay.modes.mode import Program, Results, Task, mode
from opgrip.replay.modes.torchax import as_jax, reason, set_threads
from opgrip.replay.operators import Unsupported
from opgrip.replay.timing.methods import Arguments


@mode("xla", needs=("torchax", "jax"), extra="xla", in_torch=False)
def make(task: Task) -> Program:
    """A call compiled by XLA."""
    place = torch.device(task.device)
    set_threads(task.threads)
    import jax

    # on a GPU XLA rounds what it multiplies, unless told not to
    jax.config.update("jax_default_matmul_precision", None if torch.backends.cuda.matmul.allow_tf32 else "highest")
    program, call = exported(task)
    states, function = as_jax(program)
    _keep_in(task.store)
    device = jax.devices(place.type)[place.index or 0]
    states = jax.device_put(states, device)
    compiled = jax.jit(function)

    def enter(arguments: Arguments) -> Arguments:
        return tuple(jax.device_put(_array(tensor), device) for tensor in call.enter(arguments)[0]), {}

    def run(*given: Any) -> Any:
        return jax.block_until_ready(compiled(states, given))

    def leave(given: Any) -> Results:
        return call.leave([torch.utils.dlpack.from_dlpack(array) for array in given])

    try:
        run(*enter((task.args, task.kwargs))[0])
    except Exception as error:
        raise Unsupported(f"jax cannot run it: {reason(error)}") from error
    return Program(run, enter, leave)


def _array(tensor: Tensor) -> Any:
    """A tensor as jax takes it, in the same memory where that is contiguous and aligned."""
    import jax

    return jax.numpy.from_dlpack(tensor.detach().resolve_conj().resolve_neg().contiguous())


def _keep_in(folder: Path | None) -> None:
    """Have jax keep what it compiles in a folder, however fast it did; None to keep nothing."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    wanted = None if folder is None else str(folder)
    if jax.config.jax_compilation_cache_dir == wanted:
        return
    jax.config.update("jax_compilation_cache_dir", wanted)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # else it stays with the folder that it opened first
    compilation_cache.reset_cache()
