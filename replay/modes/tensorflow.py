"""The mode `tensorflow`: the jax function of the mode `xla` as a `tf.function`, by jax2tf.

It is one operator, compiled by TensorFlow's XLA: TensorFlow's kernels are not measured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from opgrip.replay.modes.mode import Program, Results, Task, mode
from opgrip.replay.operators.admission import Unsupported

if TYPE_CHECKING:
    import torch

    from opgrip.replay.operators.memory import Arguments


@mode(
    "tensorflow", needs=("tensorflow", "torchax", "jax", "absl"), extra="tensorflow", devices=("cpu",), in_torch=False
)
def make(task: Task) -> Program:
    import tensorflow

    from opgrip.replay.modes.conversions.jax_runtime import reason, start, to_torch
    from opgrip.replay.modes.conversions.tensor_calls import exported

    _hide_gpus()
    _set_threads(task.threads)
    start(task)
    program, call = exported(task)
    function = _function(program, call.enter((task.args, task.kwargs))[0])

    def enter(arguments: Arguments) -> Arguments:
        return tuple(_to_tensorflow(tensor) for tensor in call.enter(arguments)[0]), {}

    def leave(outputs: Any) -> Results:
        dlpack = tensorflow.experimental.dlpack
        return call.leave([to_torch(dlpack.to_dlpack(tensor)) for tensor in outputs])

    try:
        function(*enter((task.args, task.kwargs))[0])
    except Exception as error:
        raise Unsupported(f"TensorFlow cannot run it: {reason(error)}") from error
    return Program(function, enter, leave)


def _function(program: torch.export.ExportedProgram, tensors: tuple[torch.Tensor, ...]) -> Any:
    import tensorflow
    from jax.experimental import jax2tf

    from opgrip.replay.modes.conversions.jax_runtime import reason
    from opgrip.replay.modes.xla import as_jax

    states, function = as_jax(program)
    try:
        converted = jax2tf.convert(
            lambda *arrays: function(states, arrays), with_gradient=False, native_serialization_platforms=("cpu",)
        )
        graph_function = tensorflow.function(converted, autograph=False, jit_compile=False)
        return graph_function.get_concrete_function(*map(_to_tensorflow, tensors))
    except Exception as error:
        raise Unsupported(f"jax2tf cannot convert it: {reason(error)}") from error


def _to_tensorflow(tensor: torch.Tensor) -> Any:
    """Return a tensor as TensorFlow's, over the same memory if it is contiguous."""
    import tensorflow

    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return tensorflow.experimental.dlpack.from_dlpack(plain.__dlpack__())


def _hide_gpus() -> None:
    """Hide GPUs from TensorFlow, which would use them whatever device torch replays on."""
    from tensorflow import config

    if config.get_visible_devices("GPU"):
        try:
            config.set_visible_devices([], "GPU")
        except RuntimeError as error:
            raise Unsupported("TensorFlow has started on a GPU in this process") from error


def _set_threads(threads: int) -> None:
    """Set TensorFlow's threads per operator; raise `Unsupported` if it already runs with another number."""
    from tensorflow import config

    started = config.threading.get_intra_op_parallelism_threads()
    if started == threads:
        return
    try:
        config.threading.set_intra_op_parallelism_threads(threads)
    except RuntimeError as error:
        message = f"TensorFlow has {started or 'other'} threads in this process and cannot change to {threads}"
        raise Unsupported(message) from error
