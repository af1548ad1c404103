"""The mode `jax`: JAX implementations of samples, compiled by XLA."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from opgrip.replay.modes import Program, RunOutputs, Task, mode
from opgrip.replay.operators.admission import Unsupported

if TYPE_CHECKING:
    from opgrip.replay.operators.memory import Arguments
    from opgrip.samples import Sample


@mode("jax", needs=("jax",), extra="xla", devices=("cpu", "cuda"), in_torch=False, autotunes=True)
def make(task: Task) -> Program:
    """Compile a sample's JAX implementation; arguments other than tensors are constant.

    Raises `Unsupported` if the sample has none, or it cannot be compiled.
    """
    from torch import Tensor

    from opgrip.replay.modes.conversions.runtimes import reason, start, to_jax, to_torch
    from opgrip.replay.operators.memory import tensors_in
    from opgrip.traces.schema.arguments import leaves, map_leaves

    sample = _sample_of(task)
    if sample is None or not sample.has_jax():
        raise Unsupported("it has no JAX implementation, as only some samples do")
    if task.mutates:
        raise Unsupported("it writes into its arguments, which JAX cannot")
    import jax

    device = start(task)
    function = sample.jax()

    def of_arrays(*arrays: Any) -> list[Any]:
        remaining_arrays = iter(arrays)
        args, kwargs = map_leaves(
            lambda leaf: next(remaining_arrays) if isinstance(leaf, Tensor) else leaf, (task.args, task.kwargs)
        )
        return [leaf for leaf in leaves(function(*args, **kwargs)) if isinstance(leaf, jax.Array)]

    compiled = jax.jit(of_arrays)

    def enter(arguments: Arguments) -> Arguments:
        return tuple(to_jax(tensor, device) for tensor in tensors_in(list(arguments))), {}

    def run(*arrays: Any) -> Any:
        return jax.block_until_ready(compiled(*arrays))

    def leave(arrays: Any) -> RunOutputs:
        return RunOutputs([to_torch(array) for array in arrays])

    try:
        run(*enter((task.args, task.kwargs))[0])
    except Exception as error:
        raise Unsupported(f"jax cannot compile it: {reason(error)}") from error
    return Program(run, enter, leave)


def _sample_of(task: Task) -> Sample | None:
    from opgrip.samples import samples

    return next((sample for sample in samples().values() if sample.function is task.function), None)
