"""The private functions of torch that the replay uses, each with a fallback if this version of torch lacks it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from opgrip.platform.private_apis import PrivatePlaces
from opgrip.replay.operators.admission import Unsupported

_places = PrivatePlaces()


def private_places() -> dict[str, str]:
    return _places.report()


_counters = _places.take_later("torch._dynamo.utils.counters", None, "the modes of torch.compile are not supported")


def graphs_compiled() -> int:
    counters = _counters()
    if counters is None:
        raise Unsupported(f"torch {torch.__version__} does not report what dynamo compiled")
    return int(counters["stats"]["unique_graphs"])


_has_kernel = _places.take(
    "torch._C._dispatch_has_kernel", lambda name: True, "a trace may name operators that only exist in TorchScript"
)


def is_dispatched(function: Any) -> bool:
    return bool(_has_kernel(function.name()))


# function that returns the names of all operators, such as `aten::add.Tensor`
operator_names: Callable[[], Sequence[str]] = _places.take(
    "torch._C._dispatch_get_all_op_names", lambda: (), "only namespaces named like an extension are trusted"
)


_has_kernel_for = _places.take(
    "torch._C._dispatch_has_kernel_for_dispatch_key",
    lambda name, key: False,
    "sizes passed to calls inside an operator are not checked",
)


def is_composite(function: Any) -> bool:
    """Return True if an operator consists of calls of other operators on every device."""
    return hasattr(function, "_schema") and bool(_has_kernel_for(function.name(), "CompositeImplicitAutograd"))


_computed_kernel = _places.take(
    "torch._C._dispatch_has_computed_kernel_for_dispatch_key",
    lambda name, key: True,
    "operators that only other devices have are not replaced",
)
_key_of_device = _places.take(
    "torch._C._dispatch_key_for_device", str.upper, "the dispatch key of a device is guessed from its name"
)


def has_kernel_on(function: Any, kind: str) -> bool:
    name, key = function.name(), _key_of_device(kind)
    # this one has a kernel for all devices, which raises
    if "_overrideable" in name:
        return bool(_has_kernel_for(name, key))
    return bool(_computed_kernel(name, key))


def graphs_skipped() -> int:
    counters = _counters()
    return 0 if counters is None else int(counters["inductor"]["cudagraph_skips"])


_list_backends = _places.take_later(
    "torch._dynamo.list_backends",
    lambda exclude_tags: torch.compiler.list_backends(),
    "compile:NAME accepts only the backends that torch.compiler lists",
)


@functools.cache
def dynamo_backends() -> list[str]:
    return list(_list_backends()(exclude_tags=()))


_inductor_config = _places.take_later("torch._inductor.config", None, "inductor compiles in separate processes")


def compile_in_this_process() -> None:
    """Prevent inductor from starting compile processes, because the replay itself runs several processes."""
    config = _inductor_config()
    if config is not None:
        config.compile_threads = 1


_NO_AOT = "the mode aot is not supported"
_compile_package = _places.take_later("torch._inductor.aoti_compile_and_package", None, _NO_AOT)
_load_package = _places.take_later("torch._inductor.aoti_load_package", None, _NO_AOT)
_boxed_run = _places.take_later(
    "torch._C._aoti.AOTIModelPackageLoader.boxed_run", None, "each run of the mode aot also copies its list of tensors"
)


def packaged(program: torch.export.ExportedProgram, path: str, make: bool) -> Callable[[list[Tensor]], list[Tensor]]:
    """Return a function that runs an exported program from the AOTInductor package at `path`."""
    compile_package, load_package = _compile_package(), _load_package()
    if compile_package is None or load_package is None:
        raise Unsupported(f"torch {torch.__version__} has no AOTInductor")
    if make:
        compile_in_this_process()
        compile_package(program, package_path=path)
    loader = load_package(path).loader
    run: Callable[[list[Tensor]], list[Tensor]] = loader.run if _boxed_run() is None else loader.boxed_run
    return run


_NO_BACKWARD = "backward passes are not replayed as separate programs"
_aot_function = _places.take_later("torch._functorch.aot_autograd.aot_function", None, _NO_BACKWARD)
_make_boxed = _places.take_later("torch._functorch.aot_autograd.make_boxed_func", None, _NO_BACKWARD)
_default_partition = _places.take_later("torch._functorch.partitioners.default_partition", None, _NO_BACKWARD)


def traced_backward(
    forward: Callable[..., Sequence[Tensor]], tensors: Sequence[Tensor], run: Callable[[Sequence[Tensor]], object]
) -> tuple[Any, tuple[Any, ...]] | None:
    """Return AOTAutograd's graph for the gradients of `forward`, and the graph's inputs."""
    aot_function, make_boxed, partition = _aot_function(), _make_boxed(), _default_partition()
    if aot_function is None or make_boxed is None or partition is None:
        return None
    graph_calls: list[tuple[Any, tuple[Any, ...]]] = []

    def keep(gm: Any, example_inputs: Any) -> Any:
        def call(*args: Any) -> Any:
            graph_calls.append((gm, args))
            return gm(*args)

        return make_boxed(call)

    def leave(gm: Any, example_inputs: Any) -> Any:
        return make_boxed(gm)

    run(aot_function(forward, fw_compiler=leave, bw_compiler=keep, partition_fn=partition)(*tensors))
    return graph_calls[0] if graph_calls else None
