"""The check of a call, and of each call of a unit's graph.

Found by calling torch's operators with arguments that do not agree, each tensor up against memory that may not be
touched, and seeing which of them read or wrote there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from opgrip.replay.operators.admission import Unsupported
from opgrip.replay.operators.agreement.sizes import both, own_memory
from opgrip.replay.operators.agreement.table import CHECKS
from opgrip.replay.operators.bounds import check_indices


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


def check_parts(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Run an operator that is made of others once, with its calls checked; what else goes wrong, goes wrong again.

    Raises
    ------
    Unsupported : where a call's arguments do not agree
    """
    with torch.no_grad(), _CheckedCalls():
        try:
            function(*args, **kwargs)
        except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
            return


class CheckedRun(fx.Interpreter):
    """Runs a unit's graph once, and checks each call before it is made: sizes inside may differ from those recorded."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a call gives."""
        check_agreement(target, args, kwargs)
        return super().call_function(target, args, kwargs)


def is_checked(graph: fx.Graph) -> bool:
    """Whether a graph calls an operator whose sizes must be held against each other."""
    return any(getattr(getattr(node.target, "_schema", None), "name", None) in CHECKS for node in graph.nodes)


def check_graph(module: fx.GraphModule, args: tuple[Any, ...]) -> None:
    """Run a unit's graph once with its calls checked, where it calls what needs it."""
    if is_checked(module.graph):
        with torch.no_grad():
            CheckedRun(module).run(*args)
