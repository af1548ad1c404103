"""The modes `jax`, `xla` and `tensorflow`, which run calls as jax functions that XLA compiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from opgrip.replay.modes import Program, RunOutputs, Task, mode
from opgrip.replay.operators.admission import Unsupported

if TYPE_CHECKING:
    import torch
    from torch._ops import OpOverloadPacket

    from opgrip.replay.operators.memory import Arguments


@mode("jax", needs=("jax",), extra="xla", devices=("cpu", "cuda"), in_torch=False, autotunes=True)
def with_jax(task: Task) -> Program:
    """Compile the JAX implementation of a sample; arguments other than tensors are constants."""
    from torch import Tensor

    from opgrip.replay.modes.conversions.runtimes import reason, start, to_jax, to_torch
    from opgrip.replay.operators.memory import tensors_in
    from opgrip.samples import samples
    from opgrip.traces.schema.arguments import leaves, map_leaves

    sample = next((sample for sample in samples().values() if sample.function is task.function), None)
    if sample is None or not sample.has_jax():
        raise Unsupported("it is not a sample with a JAX implementation")
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


def as_jax(program: torch.export.ExportedProgram) -> tuple[Any, Callable[[Any, Any], Any]]:
    from opgrip.replay.modes.conversions.runtimes import reason
    from opgrip.traces.schema.tensor_specs import plain_name

    with _importable():
        import torchax
        import torchax.export

        # reads the tables of operators while they are patched
        torchax.default_env()
    _name_dtypes(program.graph)
    try:
        states, function = torchax.export.exported_program_to_jax(program)
    except Exception as error:
        raise Unsupported(f"torchax cannot convert it: {reason(error)}") from error
    outputs = program.graph.output_node().args[0]
    dtypes = [plain_name(node.meta["val"].dtype) for node in outputs]

    def as_torch_has_it(states: Any, inputs: Any) -> Any:
        arrays = function(states, inputs)
        return tuple(array.astype(dtype) for array, dtype in zip(arrays, dtypes, strict=True))

    return states, as_torch_has_it


def _name_dtypes(graph: torch.fx.Graph) -> None:
    import torch

    # jax has another default dtype than torch in 64-bit mode
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(node.target, torch._ops.OpOverload) and isinstance(value, torch.Tensor):
            schema_arguments = node.target._schema.arguments
            takes_tensors = any("Tensor" in str(argument.type) for argument in schema_arguments)
            names_dtype = any(argument.name == "dtype" for argument in schema_arguments)
            if names_dtype and not takes_tensors and node.kwargs.get("dtype") is None:
                node.update_kwarg("dtype", value.dtype)


@contextmanager
def _importable() -> Iterator[None]:
    import torch
    from torch._ops import OpOverloadPacket

    find = OpOverloadPacket.__getattr__

    def find_or_stand_in(packet: OpOverloadPacket, name: str) -> Any:
        try:
            return find(packet, name)
        except AttributeError:
            if name.startswith("__"):
                raise
            return object()

    tables = torch._decomp.global_decomposition_table
    saved_tables = {kind: dict(table) for kind, table in tables.items()}
    fast = torch.backends.mha.get_fastpath_enabled()
    try:
        # imported late because it takes a tenth of the time of `opreplay --help`, which imports this file
        from unittest.mock import patch

        with ExitStack() as patches:
            patches.enter_context(patch.object(OpOverloadPacket, "__getattr__", find_or_stand_in))
            patches.enter_context(patch.object(torch.utils, "rename_privateuse1_backend"))
            patches.enter_context(patch.object(torch, "_register_device_module"))
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for kind, table in tables.items():
            table.clear()
            table.update(saved_tables[kind])


@mode("xla", needs=("torchax", "jax"), extra="xla", devices=("cpu", "cuda"), in_torch=False, autotunes=True)
def with_xla(task: Task) -> Program:
    import jax

    from opgrip.replay.modes.conversions.runtimes import exported, reason, runtime_program, start, to_jax, to_torch

    device = start(task)
    program, call = exported(task)
    states, function = as_jax(program)
    states = jax.device_put(states, device)
    compiled = jax.jit(function)

    def run(*arrays: Any) -> Any:
        return jax.block_until_ready(compiled(states, arrays))

    try:
        return runtime_program(task, call, run, lambda tensor: to_jax(tensor, device), to_torch)
    except Exception as error:
        raise Unsupported(f"jax cannot run it: {reason(error)}") from error


@mode(
    "tensorflow", needs=("tensorflow", "torchax", "jax", "absl"), extra="tensorflow", devices=("cpu",), in_torch=False
)
def with_tensorflow(task: Task) -> Program:
    import tensorflow

    from opgrip.replay.modes.conversions.runtimes import exported, reason, runtime_program, start, to_torch

    _hide_gpus()
    _set_threads(task.threads)
    start(task)
    program, call = exported(task)
    function = _function(program, call.enter((task.args, task.kwargs))[0])

    def from_tensorflow(tensor: Any) -> torch.Tensor:
        return to_torch(tensorflow.experimental.dlpack.to_dlpack(tensor))

    try:
        return runtime_program(task, call, function, _to_tensorflow, from_tensorflow)
    except Exception as error:
        raise Unsupported(f"TensorFlow cannot run it: {reason(error)}") from error


def _function(program: torch.export.ExportedProgram, tensors: tuple[torch.Tensor, ...]) -> Any:
    import tensorflow
    from jax.experimental import jax2tf

    from opgrip.replay.modes.conversions.runtimes import reason

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
    import tensorflow

    from opgrip.replay.modes.conversions.runtimes import plain

    return tensorflow.experimental.dlpack.from_dlpack(plain(tensor).__dlpack__())


def _hide_gpus() -> None:
    from tensorflow import config

    if config.get_visible_devices("GPU"):
        try:
            config.set_visible_devices([], "GPU")
        except RuntimeError as error:
            raise Unsupported("TensorFlow has started on a GPU in this process") from error


def _set_threads(threads: int) -> None:
    from tensorflow import config

    started = config.threading.get_intra_op_parallelism_threads()
    if started == threads:
        return
    try:
        config.threading.set_intra_op_parallelism_threads(threads)
    except RuntimeError as error:
        message = f"TensorFlow runs with {started or 'other'} threads in this process and cannot change to {threads}"
        raise Unsupported(message) from error
