"""The mode `jit`: TorchScript, from a function's source if it is readable, otherwise by tracing a run."""

from __future__ import annotations

import warnings
from types import BuiltinFunctionType, FunctionType
from typing import Any

from opgrip.errors import one_line
from opgrip.replay.modes.mode import Program, Task, mode
from opgrip.replay.operators.admission import Unsupported

FROZEN = ("to a Python boolean", "to a Python float", "to a Python list", "to a NumPy array")
"""parts of the tracer's warnings about values of this run that become constants

The tracer also warns of sizes, which are integers.
"""
RUNS = 2
"""number of runs before timing: the first is profiled, the second compiles"""


@mode("jit", differentiable=True, ahead=False)
def with_torchscript(task: Task) -> Program:
    """Script the call, or trace it if that fails.

    Raises `Unsupported` if neither works: scripts support a part of Python, traces follow one branch.
    """
    import torch

    from opgrip.replay.modes.conversions.tensor_calls import TensorCall

    if _calls_extension(task.function):
        raise Unsupported("TorchScript does not see what a function of an extension does, and would keep its results")
    refused = ""
    if isinstance(task.function, FunctionType):
        try:
            with _quiet():
                scripted = torch.jit.script(task.function)
            for _ in range(RUNS):
                scripted(*_copied(task.args), **_copied(task.kwargs))
            return Program(scripted, note="scripted")
        except Exception as error:
            refused = f"; it cannot be scripted: {one_line(error, 150)}"
    call = TensorCall(task, in_place=True)
    args, _ = call.enter((task.args, task.kwargs))
    if not args:
        raise Unsupported("none of its arguments is a tensor, or a list, tuple or dict with one")
    with _quiet(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        traced = torch.jit.trace(call, args, check_trace=False)
    warned = " ".join(str(warning.message) for warning in caught)
    if any(words in warned for words in FROZEN):
        raise Unsupported(f"a trace would be for these values only{refused}")
    for _ in range(RUNS):
        traced(*_copied(args))
    return Program(traced, call.enter, call.leave, in_place=task.mutates, note="traced")


def _calls_extension(function: Any) -> bool:
    """Return True for a function of an extension module, or a graph with one."""
    import torch

    if isinstance(function, torch.fx.GraphModule):
        return any(_calls_extension(node.target) for node in function.graph.nodes if node.op == "call_function")
    if not isinstance(function, BuiltinFunctionType):
        return False
    return (function.__module__ or "builtins").split(".")[0] not in ("torch", "_operator", "builtins", "math")


def _copied(tree: Any) -> Any:
    import torch

    from opgrip.traces.schema.arguments import map_leaves

    return map_leaves(lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf, tree)


class _quiet(warnings.catch_warnings):
    """A context that ignores the warning that TorchScript is deprecated."""

    def __enter__(self) -> None:
        super().__enter__()
        warnings.simplefilter("ignore", DeprecationWarning)
