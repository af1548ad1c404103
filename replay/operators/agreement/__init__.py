"""Checks that keep replayed calls from accessing memory outside their tensors, because traces may be untrusted."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from opgrip.replay.operators.admission import Unsupported
from opgrip.replay.operators.agreement.indices import check_indices
from opgrip.replay.operators.agreement.sizes import CHECKS, required_sizes
from opgrip.replay.operators.torch_private import is_composite

REVIEWED = ((2, 6), (2, 13), (2, 15))  # versions of torch; those in between count as reviewed too


def check_agreement(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise `Unsupported` if sizes of a call's arguments do not match and the operator does not check this itself."""
    schema = getattr(function, "_schema", None)
    if schema is None:
        return
    outputs = " ".join(argument.name for argument in schema.arguments if argument.is_out)
    rules = (*CHECKS.get(schema.name, ()), *([f"{outputs}: memory"] if outputs else ()))
    if not rules:
        return
    names = (argument.name for argument in schema.arguments)
    defaults = {argument.name: argument.default_value for argument in schema.arguments if argument.has_default_value()}
    call = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
    try:
        for name, actual, expected in required_sizes(schema.name, call, rules):
            if actual != expected:
                mismatch = f"`{name}` is false" if expected is True else f"{name} has {actual} instead of {expected}"
                raise Unsupported(f"its sizes do not match: {mismatch}")
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise Unsupported(f"its sizes cannot be compared ({error})") from error


class _CheckedCalls(TorchDispatchMode):
    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        check_agreement(function, args, kwargs)
        check_indices(function, args, kwargs)
        return function(*args, **kwargs)


def checking_parts(function: Any) -> AbstractContextManager[Any]:
    return _CheckedCalls() if is_composite(function) else nullcontext()


def check_parts(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Run a composite operator once; raise `Unsupported` if a call that it makes has invalid sizes or indices."""
    with torch.no_grad(), checking_parts(function):
        try:
            function(*args, **kwargs)
        except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
            # it occurs again when the operator is measured
            return


def check_graph(module: fx.GraphModule, args: tuple[Any, ...]) -> None:
    """Run a subgraph once if it calls operators that need checks; raise `Unsupported` for invalid sizes or indices."""
    # a call whose indices are clamped keeps its operator in `bounds`
    called = (getattr(node.target, "bounds", node.target) for node in module.graph.nodes if node.op == "call_function")
    names = ((getattr(getattr(function, "_schema", None), "name", None), function) for function in called)
    if any(name in CHECKS or is_composite(function) for name, function in names):
        with torch.no_grad(), _CheckedCalls():
            fx.Interpreter(module).run(*args)
