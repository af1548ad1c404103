"""Which of a function's decorators changed it, told from the live object that its name is bound to."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

from opgrip.capture.grip.source.files import SourceFile, find_function, first_line
from opgrip.capture.grip.source.imports import is_imported, module_of
from opgrip.capture.grip.source.resolve import (
    ABSENT,
    Namespace,
    evaluate,
    is_imported_code,
    namespace_of,
    plain,
    python_function,
    wrapped,
)
from opgrip.errors import UserError


@dataclass(frozen=True, slots=True)
class FunctionDefinition:
    """A live function as it is written down.

    Attributes
    ----------
    function : the one inside all decorators
    node : its definition
    dropped : those of its decorators that gave it back as it was, or that a sample does without
    """

    function: FunctionType
    file: SourceFile
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    dropped: tuple[ast.expr, ...]


def find_definition(thing: Any) -> FunctionDefinition:
    """How a callable is written down: its function, with the decorators that made the callable of it.

    A wrapper that no decorator explains, as `fast = cached(slow)` makes one, is written as the function that it is.

    Raises
    ------
    UserError : where there is no source
    """
    layers = _layers(plain(thing))
    for index in range(len(layers) - 1, -1, -1):
        function = layers[index]
        if not isinstance(function, FunctionType) or (index and is_imported_code(function)):
            continue
        file, node = find_function(function)
        decorators = [] if isinstance(node, ast.Lambda) else node.decorator_list
        wrapping_decorators = _find_wrapping_decorators(layers[:index], decorators, namespace_of(function))
        if wrapping_decorators is not None:
            return FunctionDefinition(
                function, file, node, tuple(one for one in decorators if one not in wrapping_decorators)
            )
    name = getattr(thing, "__qualname__", type(thing).__qualname__)
    raise UserError(f"{name} is no function of Python", f"what makes it, {type(thing).__qualname__}, has no source")


def _layers(thing: Any) -> list[Any]:
    """A callable, what it wraps, and so on."""
    layers = [thing]
    while len(layers) < 100:
        inner = wrapped(layers[-1])
        if inner is None:
            inner = _wrapped_silently(layers[-1])
        if inner is None:
            break
        layers.append(plain(inner))
    return layers


def _wrapped_silently(layer: Any) -> FunctionType | None:
    """The function that a wrapper holds, without saying so, since a decorator put it there."""
    if isinstance(layer, FunctionType):
        held = list(namespace_of(layer).closure.values())
    elif is_imported(type(layer).__module__):
        return None
    else:
        held = list(getattr(layer, "__dict__", {}).values())
    for thing in held:
        if not isinstance(thing, FunctionType) or is_imported(module_of(thing) or ""):
            continue
        try:
            _, node = find_function(thing)
        except UserError:
            continue
        decorators = getattr(node, "decorator_list", [])
        if any(_explains(one, layer, namespace_of(thing)) for one in decorators):
            return thing
    return None


def _find_wrapping_decorators(
    layers: list[Any], decorators: list[ast.expr], namespace: Namespace
) -> list[ast.expr] | None:
    """The decorators that made the wrappers around a function; None where some wrapper is of none of them."""
    wrapping_decorators: list[ast.expr] = []
    for layer in layers:
        reasons = [decorator for decorator in decorators if _explains(decorator, layer, namespace)]
        if not reasons:
            return None
        wrapping_decorators += reasons
    return wrapping_decorators


def _explains(decorator: ast.expr, layer: Any, namespace: Namespace) -> bool:
    """Whether a decorator made a wrapper."""
    live = evaluate(decorator.func if isinstance(decorator, ast.Call) else decorator, namespace)
    if live is ABSENT:
        return False
    if is_imported_code(layer):
        return is_imported(module_of(live) or type(live).__module__) and plain_name(live) not in _MODES
    if isinstance(live, type) and type(layer) is live:
        return True
    if not isinstance(layer, FunctionType):
        return False
    if isinstance(live, type):
        maker = python_function(vars(live).get("__call__"))
    else:
        maker = python_function(live.__func__ if isinstance(live, MethodType) else live)
    if maker is None:
        return False
    file, node = find_function(layer)
    return maker.__code__.co_filename == file.name and any(
        first_line(around) == maker.__code__.co_firstlineno for around in file.enclosing(node)
    )


_MODES = ("torch.jit._script.script", "torch.jit._script.script_if_tracing", "torch.compile")


def plain_name(thing: Any) -> str:
    """Module and name of a function or class."""
    return f"{module_of(thing)}.{getattr(thing, '__qualname__', '')}"
