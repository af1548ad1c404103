"""Triton kernels that a trace names; they must be in modules that the user trusts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from inspect import signature as signature_of
from typing import Any

import torch

from opgrip.replay.operators.admission import Unsupported
from opgrip.traces.schema.arguments import Opaque
from opgrip.traces.schema.operator_arguments import LARGEST, MOST_DIMENSIONS, TYPES
from opgrip.traces.schema.python_objects import NamedSpec

_INTERPRETED = ("triton.runtime.interpreter", "InterpretedFunction")
_KERNELS = (("triton.runtime.jit", "JITFunction"), _INTERPRETED)
_AROUND = (("triton.runtime.autotuner", "Autotuner"), ("triton.runtime.autotuner", "Heuristics"))

# function that returns the attribute of a trusted module, given a name `module:kernel`
FindKernel = Callable[[str], Any]


def kernel_in(thing: Any) -> Any:
    """Return the Triton kernel in an object without its autotuners and heuristics; None if it contains no kernel."""
    while _is_any(thing, _AROUND):
        thing = thing.fn
    return thing if _is_any(thing, _KERNELS) else None


def launcher(kernel: Any, find: FindKernel) -> Callable[..., None]:
    """Return a function that launches a Triton kernel with the recorded grid, constants and options, without tuning.

    find : function that returns a trusted module's kernel for a name such as `module:kernel`

    The returned function raises `Unsupported` if the recorded launch does not fit the kernel.
    """
    if not _is_any(kernel, (_INTERPRETED,)):
        _check_driver()
    parameters = tuple(signature_of(kernel.fn).parameters)

    def launch(*args: Any, grid: tuple[int, ...], constants: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        running = [name for name in parameters if name not in constants]
        if len(running) != len(args) or not {*constants} <= {*parameters}:
            raise Unsupported(f"the kernel has other parameters now: {', '.join(parameters)}")
        _check_grid(grid)
        for name, value in options.items():
            # options that are not numbers name files and targets
            if type(value) not in (int, bool, float) or name in parameters or name in ("grid", "warmup"):
                raise Unsupported(f"the launch has the option {name[:60]!r}, which a replay does not support")
        named = dict(zip(running, args, strict=True)) | {
            name: _constant(value, find) for name, value in constants.items()
        }
        kernel.run(grid=tuple(grid), warmup=False, **named, **options)

    return launch


def _constant(value: Any, find: FindKernel) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(_constant(item, find) for item in value)
    if isinstance(value, Opaque):
        raise Unsupported(f"a constant of the launch is {value.type_name}, which a trace cannot hold")
    if isinstance(value, NamedSpec):
        return find(value.name)
    if isinstance(value, torch.dtype):
        language = sys.modules["triton.language"]
        dtype = getattr(language, TYPES.get(value, ""), None)
        if not isinstance(dtype, language.dtype):
            raise Unsupported(f"the installed Triton has no dtype {value}")
        return dtype
    return value


def _is_any(thing: Any, classes: Sequence[tuple[str, str]]) -> bool:
    kinds = (getattr(sys.modules.get(module), name, None) for module, name in classes)
    return any(isinstance(kind, type) and isinstance(thing, kind) for kind in kinds)


def _check_driver() -> None:
    try:
        sys.modules["triton"].runtime.driver.active.get_current_target()
    except Exception as error:
        reason = "a Triton kernel needs a GPU that Triton has a driver for; TRITON_INTERPRET=1 runs it on the CPU"
        raise Unsupported(reason) from error


def _check_grid(grid: Any) -> None:
    sizes = grid if isinstance(grid, tuple | list) else ()
    if not 1 <= len(sizes) <= MOST_DIMENSIONS or any(
        type(size) is not int or not 0 <= size <= LARGEST for size in sizes
    ):
        raise Unsupported(f"the grid of a launch is not a list of 1 to {MOST_DIMENSIONS} sizes: {str(grid)[:60]}")
