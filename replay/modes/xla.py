"""XLA: the exported call as a function of jax, by torchax, compiled for this CPU or GPU.

Torchax is taken rather than torch_xla, each version of which works with one version of torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from opgrip.replay.modes.mode import Program, Results, Task, mode
from opgrip.replay.operators.admission import Unsupported

if TYPE_CHECKING:
    from opgrip.replay.operators.memory import Arguments


@mode("xla", needs=("torchax", "jax"), extra="xla", devices=("cpu", "cuda"), in_torch=False, autotunes=True)
def make(task: Task) -> Program:
    """A call compiled by XLA."""
    import jax

    from opgrip.replay.modes.conversions.graphs import exported
    from opgrip.replay.modes.conversions.jax_runtime import reason, start, to_jax, to_torch
    from opgrip.replay.modes.conversions.torchax import as_jax

    device = start(task)
    program, call = exported(task)
    states, function = as_jax(program)
    states = jax.device_put(states, device)
    compiled = jax.jit(function)

    def enter(arguments: Arguments) -> Arguments:
        return tuple(to_jax(tensor, device) for tensor in call.enter(arguments)[0]), {}

    def run(*arrays: Any) -> Any:
        return jax.block_until_ready(compiled(states, arrays))

    def leave(arrays: Any) -> Results:
        return call.leave([to_torch(array) for array in arrays])

    try:
        run(*enter((task.args, task.kwargs))[0])
    except Exception as error:
        raise Unsupported(f"jax cannot run it: {reason(error)}") from error
    return Program(run, enter, leave)
