"""What replay takes from torch that torch keeps to itself; tried with 2.13."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def graphs_compiled() -> int:
    """Graphs that dynamo has handed to a backend in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


@functools.cache
def dynamo_backends() -> list[str]:
    """Names of all backends that torch.compile knows, those for debugging too."""
    return list(torch._dynamo.list_backends(exclude_tags=()))


def compile_in_this_process() -> None:
    """Let inductor start no processes of its own: there are as many as compile side by side already."""
    from torch._inductor import config

    config.compile_threads = 1


def packaged(program: torch.export.ExportedProgram, path: str, make: bool) -> Callable[[list[Tensor]], list[Tensor]]:
    """AOTInductor's package of an exported program, as a program in C++ calls it.

    The loaded model's own call parses the shape of its arguments each time.
    """
    if make:
        compile_in_this_process()
        torch._inductor.aoti_compile_and_package(program, package_path=path)
    run: Callable[[list[Tensor]], list[Tensor]] = torch._inductor.aoti_load_package(path).loader.boxed_run
    return run


def traced_backward(
    forward: Callable[..., Sequence[Tensor]], tensors: Sequence[Tensor], run: Callable[[Sequence[Tensor]], object]
) -> tuple[Any, tuple[Any, ...]] | None:
    """The graph that AOTAutograd makes of a function's gradients, and what it takes; None where it makes none.

    Parameters
    ----------
    run : runs the backward of the function's results
    """
    from torch._functorch.aot_autograd import aot_function, make_boxed_func  # type: ignore[attr-defined]
    from torch._functorch.partitioners import default_partition

    met: list[tuple[Any, tuple[Any, ...]]] = []

    def keep(gm: Any, example_inputs: Any) -> Any:
        def call(*args: Any) -> Any:
            met.append((gm, args))
            return gm(*args)

        return make_boxed_func(call)

    def leave(gm: Any, example_inputs: Any) -> Any:
        return make_boxed_func(gm)

    run(aot_function(forward, fw_compiler=leave, bw_compiler=keep, partition_fn=default_partition)(*tensors))
    return met[0] if met else None
