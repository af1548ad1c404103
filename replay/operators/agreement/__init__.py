"""Checks that keep replayed calls from accessing memory outside their tensors, because traces may be untrusted."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from opgrip.replay.operators.admission import Unsupported
from opgrip.replay.operators.agreement.indices import bounding, check_indices
from opgrip.replay.operators.agreement.sizes import CHECKS, named, required_sizes
from opgrip.replay.operators.memory import Function, tensors_in
from opgrip.replay.operators.torch_private import is_composite

REVIEWED = ((2, 6), (2, 13), (2, 15))  # versions of torch; those in between count as reviewed too


def check_agreement(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise `Unsupported` if sizes of a call's arguments do not match and the operator does not check this itself."""
    (operator, names), schema = named(function), getattr(function, "_schema", None)
    arguments = () if schema is None else schema.arguments
    outputs = " ".join(argument.name for argument in arguments if argument.is_out)
    rules = (*CHECKS.get(operator, ()), *([f"{outputs}: memory"] if outputs else ()))
    if not rules:
        return
    defaults = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    call = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
    # torch takes None for False
    flags = (argument.name for argument in arguments if argument.type.kind() == "BoolType")
    call |= {name: False for name in flags if call.get(name) is None}
    try:
        for name, actual, expected in required_sizes(operator, call, rules):
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


class _CheckedGraph(fx.Interpreter):
    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.extra_traceback = False  # adds the place in the graph to errors
        self._used: list[torch.Tensor] = []

    def run_node(self, n: fx.Node) -> Any:
        is_call = n.op == "call_function" and not isinstance(n.target, BuiltinFunctionType)
        arguments = _with_parts(self.fetch_args_kwargs_from_env(n)) if is_call else []
        # operators trust its indices, but another call may have changed them, or made it without checks
        if any(tensor is other for tensor in arguments for other in self._used):
            raise Unsupported("a call uses a sparse or nested tensor of another call, which is not checked")
        result = super().run_node(n)
        self._used += arguments + (_with_parts(result) if is_call else [])
        return result


def _with_parts(tree: Any) -> list[torch.Tensor]:
    return [tensor for tensor in tensors_in(tree) if tensor.is_nested or tensor.layout is not torch.strided]


def check_graph(module: fx.GraphModule, args: tuple[Any, ...]) -> None:
    """Run a subgraph once; raise `Unsupported` if a call has invalid sizes, indices or tensors."""
    before = _sizes(args)
    with torch.no_grad(), _CheckedCalls():
        _CheckedGraph(module).run(*args)
    if before != _sizes(args):
        raise Unsupported("it changes the sizes of its arguments, so that only its first run can be checked")


def checking_again(function: Function) -> Function:
    """Return a function that checks the arguments of `function` again whenever their sizes differ from those before."""
    run, is_mutable = bounding(function), getattr(getattr(function, "_schema", None), "is_mutable", False)
    if not (is_mutable or named(function)[0] in CHECKS or is_composite(function)):
        return run
    checked: list[object] = [None]

    def checked_call(*args: Any, **kwargs: Any) -> Any:
        sizes = _sizes((args, kwargs))
        if torch.compiler.is_compiling() or checked[0] == sizes:
            return run(*args, **kwargs)
        check_agreement(function, args, kwargs)
        with checking_parts(function):
            result = run(*args, **kwargs)
        checked[0] = sizes
        return result

    return checked_call


def _sizes(tree: Any) -> list[object]:
    # a nested tensor has no shape, and a sparse one no strides
    return [
        tensor.is_nested or (tensor.shape, tensor.stride() if tensor.layout is torch.strided else None)
        for tensor in tensors_in(tree)
    ]
