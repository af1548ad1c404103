"""The mode `jit`: TorchScript, of a function's source where it can be read, else of what a run of it calls."""

from __future__ import annotations

import warnings
from types import FunctionType

import torch

from opgrip.replay.modes.graphs import TensorCall
from opgrip.replay.modes.mode import Program, Task, mode
from opgrip.replay.operators import Unsupported
from opgrip.traces.errors import one_line

FROZEN = "to a Python boolean"
"""In the warning of the tracer that it follows one branch of several."""


@mode("jit", differentiable=True, ahead=False)
def with_torchscript(task: Task) -> Program:
    """The call scripted, else traced.

    Raises
    ------
    Unsupported : where neither can be: a script cannot have all of Python, a trace follows one branch only
    """
    refused = ""
    if isinstance(task.function, FunctionType):
        try:
            with _quiet():
                return Program(torch.jit.script(task.function), note="scripted")
        except Exception as error:
            refused = f"; it cannot be scripted: {one_line(error, 150)}"
    call = TensorCall(task, in_place=True)
    args, _ = call.enter((task.args, task.kwargs))
    if not args:
        raise Unsupported("it takes no tensor")
    with _quiet(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", torch.jit.TracerWarning)
        traced = torch.jit.trace(call, args, check_trace=False)
    if any(FROZEN in str(warning.message) for warning in caught):
        raise Unsupported(f"a trace would follow the branch of these values only{refused}")
    return Program(traced, call.enter, call.leave, in_place=task.mutates, note="traced")


class _quiet(warnings.catch_warnings):  # type: ignore[type-arg]
    """Passes over the notice that TorchScript is deprecated."""

    def __enter__(self) -> None:
        super().__enter__()
        warnings.simplefilter("ignore", DeprecationWarning)
