"""The check of a call, and of each call of a unit's graph.

Found by calling torch's operators with arguments that do not agree, each tensor up against memory that may not be
touched, and seeing which of them read or wrote there.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from opgrip.replay.operators.admission import Unsupported
from opgrip.replay.operators.agreement.sizes import both, own_memory
from opgrip.replay.operators.agreement.table import CHECKS
from opgrip.replay.operators.bounds import bounded_function, check_indices
from opgrip.replay.operators.torch_private import is_composite


def check_agreement(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Hold a call's arguments against each other, where its operator does not.

    Raises
    ------
    Unsupported : where they do not agree
    """
    schema = getattr(function, "_schema", None)
    if schema is None:
        return
    outputs = [argument.name for argument in schema.arguments if argument.is_out]
    checks = [CHECKS[schema.name]] if schema.name in CHECKS else []
    if not outputs and not checks:
        return
    names = (argument.name for argument in schema.arguments)
    defaults = {argument.name: argument.default_value for argument in schema.arguments if argument.has_default_value()}
    call = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
    try:
        for name, actual, expected in both(*checks, own_memory(*outputs))(call):
            if actual != expected:
                raise Unsupported(f"its sizes do not agree: {name} has {actual} where {expected} fits")
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, RuntimeError, ZeroDivisionError) as error:
        raise Unsupported(f"its sizes cannot be held against each other ({error})") from error


class _CheckedCalls(TorchDispatchMode):
    """Checks each call that an operator makes, before it is made."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        check_agreement(function, args, kwargs)
        check_indices(function, args, kwargs)
        return function(*args, **kwargs)


def checking_parts(function: Any) -> AbstractContextManager[Any]:
    """A context in which the calls that an operator makes are checked, if it is made of others.

    Raises
    ------
    Unsupported : from the call, where arguments of one that it makes do not agree
    """
    return _CheckedCalls() if is_composite(function) else nullcontext()


def check_parts(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Run an operator that is made of others once, with its calls checked; what else goes wrong, goes wrong again."""
    with torch.no_grad(), checking_parts(function):
        try:
            function(*args, **kwargs)
        except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
            return


def is_checked(graph: fx.Graph) -> bool:
    """Whether a graph calls an operator whose sizes must be held against each other, or one made of others."""
    functions = (bounded_function(node.target) for node in graph.nodes if node.op == "call_function")
    return any(
        getattr(getattr(function, "_schema", None), "name", None) in CHECKS or is_composite(function)
        for function in functions
    )


def check_graph(module: fx.GraphModule, args: tuple[Any, ...]) -> None:
    """Run a unit's graph once with its calls checked, where it calls what needs it.

    Sizes inside may differ from those recorded.
    """
    if is_checked(module.graph):
        with torch.no_grad(), _CheckedCalls():
            fx.Interpreter(module).run(*args)
