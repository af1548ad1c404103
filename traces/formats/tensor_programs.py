"""Calls of a Python program of tensors, found by reading its syntax tree on meta tensors.

A program is a function such as the `forward` that torch.fx generates, or the reference of a kernel. Its text is never
compiled, imported or evaluated by Python. A fixed set of statements and expressions is followed here, and only the
functions and operators of `tensor_functions.py` run.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from opgrip.traces.formats.configurations.modules import PIECES, MetaRecording, Recorded
from opgrip.traces.formats.tensor_functions import (
    CONSTANTS,
    IN_PLACE,
    OPERATOR_METHODS,
    OPERATORS,
    EndOfReading,
    checked,
    functions,
    operated,
    run_function,
)

MOST_TEXT = 16 << 20
MOST_TOKENS = 400_000
"""Words and signs of a program, each of which may cost a KB to parse."""
MOST_CALLS = 20_000
"""Calls of one run of a function."""
MOST_STEPS = 500_000
"""Expressions that are read, those of loops as often as the loops run."""
MOST_DEPTH = 50
"""Nested calls of the program's own functions."""
TOKEN = re.compile(r"\w+|[^\w\s]")
ITEM = "_opgrip_item"
"""attribute of a meta tensor: its only element"""
ATTRIBUTES = frozenset(
    {"shape", "dtype", "device", "ndim", "T", "mT", "H", "mH", "real", "imag", "data", "requires_grad", "itemsize"}
)
OF_RESULTS = frozenset({"values", "indices", "min", "max", "eps", "tiny", "U", "S", "Vh", "Q", "R", "L"})
"""Attributes of named results, and of `finfo` and `iinfo`."""
CONTEXTS = frozenset({"torch.no_grad", "torch.inference_mode", "torch.enable_grad"})


@dataclass(frozen=True, slots=True)
class Unconverted:
    """A statement that is not converted: the function that it calls, if any, and the reason."""

    op: str
    reason: str


@dataclass(frozen=True, slots=True)
class _Path:
    """A dotted name that starts with a module."""

    name: str


@dataclass(frozen=True, slots=True)
class _Missing:
    """The value of a name that is not known."""

    reason: str


class TensorProgram:
    """The functions of a program's text, one of which is read at a time.

    Raise `ValueError` for a text that is not Python.
    """

    def __init__(self, text: str, recording: MetaRecording) -> None:
        if len(text) > MOST_TEXT or sum(1 for _ in TOKEN.finditer(text)) > MOST_TOKENS:
            raise ValueError(f"its text has more than {MOST_TOKENS:,} words")
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise ValueError("its text is not Python") from error
        self.recording = recording
        self._steps = self._depth = 0
        self._globals: dict[str, Any] = {"torch": _Path("torch"), "math": _Path("math")}
        for item in tree.body:
            self.define(item)

    def define(self, item: ast.stmt) -> None:
        """Store the names that an import, function or assignment at the top level defines."""
        match item:
            case ast.Import(names=names):
                for alias in names:
                    self._globals[alias.asname or alias.name.partition(".")[0]] = _Path(
                        alias.name if alias.asname else alias.name.partition(".")[0]
                    )
            case ast.ImportFrom(module=str() as module, names=names):
                self._globals |= {alias.asname or alias.name: _Path(f"{module}.{alias.name}") for alias in names}
            case ast.FunctionDef(name=name):
                self._globals[name] = item
            case ast.ClassDef(body=body):
                for inner in body:
                    self.define(inner)
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                try:
                    with self.recording.running():
                        self._globals[name] = _Reading(self, {}).value(value)
                except (ValueError, RecursionError) as error:
                    self._globals[name] = _Missing(str(error))

    def parameters(self, name: str) -> list[str]:
        """Return the names of a function's parameters without `self`, or raise `ValueError` if there is none."""
        function = self._globals.get(name)
        if not isinstance(function, ast.FunctionDef):
            raise ValueError(f"it has no function {name}")
        return [item.arg for item in (*function.args.args, *function.args.kwonlyargs) if item.arg != "self"]

    def calls(
        self, name: str, arguments: Mapping[str, Any], numbers: Mapping[str, Any] | None = None
    ) -> Iterator[tuple[int, Recorded | Unconverted]]:
        """Yield the calls of a function in order, each with its line, and statements that are not converted.

        arguments : trees of values and `TensorSpec`; parameters without an argument are unknown
        numbers : what `item` returns for arguments that are tensors of one element, if it is known
        """
        unknown = {
            key: _Missing(f"it needs the input {key[:200]}, which is not known") for key in self.parameters(name)
        }
        reading = _Reading(self, {})
        for key, value in arguments.items():
            with suppress(ValueError):
                reading.variables[key] = self.recording.tensors(value)
                if numbers and key in numbers:
                    setattr(reading.variables[key], ITEM, numbers[key])
        with suppress(ValueError), self.recording.running():
            self._set_defaults(self._globals[name], reading)
        reading.variables = unknown | reading.variables
        count = self._steps = 0
        for statement in self._globals[name].body:
            has_returned = False
            try:
                with self.recording.running() as calls:
                    has_returned = reading.statement(statement)
            except (ValueError, RecursionError) as error:
                reason = str(error) if isinstance(error, ValueError) else "it nests too deep"
                reading.forget(statement, reason)
                yield statement.lineno, Unconverted(_called(statement), reason[:300])
                if isinstance(error, EndOfReading):
                    return
                continue
            count += len(calls)
            yield from ((statement.lineno, call) for call in calls)
            if has_returned:
                return
            if count > MOST_CALLS:
                yield statement.lineno, Unconverted("?", f"it makes more than {MOST_CALLS:,} calls")
                return

    def step(self) -> None:
        self._steps += 1
        if self._steps > MOST_STEPS:
            raise ValueError(f"it runs more than {MOST_STEPS:,} expressions")

    def named(self, name: str) -> Any:
        """Return a function, constant or module by the name that the program uses for it."""
        return self._globals.get(name, _Path(name))

    def inner_call(self, function: ast.FunctionDef, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of a call of one of the program's own functions."""
        signature = function.args
        names = [item.arg for item in (*signature.posonlyargs, *signature.args)]
        if signature.vararg or signature.kwarg or len(args) > len(names):
            raise ValueError(f"unsupported: a call of {function.name[:60]} with other arguments")
        reading = _Reading(self, {**dict(zip(names, args, strict=False)), **kwargs})
        self._set_defaults(function, reading)
        if self._depth >= MOST_DEPTH:
            raise ValueError("its functions call each other too deep")
        self._depth += 1
        try:
            reading.block(function.body)
        finally:
            self._depth -= 1
        return reading.result

    def _set_defaults(self, function: ast.FunctionDef, reading: _Reading) -> None:
        """Set the parameters of a function that a call does not give."""
        signature = function.args
        names = [item.arg for item in (*signature.posonlyargs, *signature.args)]
        nodes: dict[str, ast.expr | None] = dict(zip(reversed(names), reversed(signature.defaults), strict=False))
        nodes |= {item.arg: node for item, node in zip(signature.kwonlyargs, signature.kw_defaults, strict=True)}
        for name, node in nodes.items():
            if name not in reading.variables and node is not None:
                reading.variables[name] = reading.value(node)


def _called(statement: ast.stmt) -> str:
    """Return the name of the outermost function that a statement calls."""
    for node in ast.walk(statement):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
            return ast.unparse(node.func)[-100:]
    return type(statement).__name__


class _Reading:
    """One run of a function.

    variables : values of its names
    result : what it returned
    """

    def __init__(self, program: TensorProgram, variables: dict[str, Any]) -> None:
        self.variables = variables
        self.result: Any = None
        self._program = program

    def forget(self, statement: ast.stmt, reason: str) -> None:
        """Mark names that a failed statement assigns."""
        nodes = [node for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
        cause = reason if reason.startswith("it needs") else f"it needs the result of {_called(statement)}"
        self.variables |= {node.id: _Missing(cause) for node in nodes}

    def block(self, body: Sequence[ast.stmt]) -> bool:
        """Follow statements, and return True if one of them ends the function."""
        return any(self.statement(statement) for statement in body)

    def statement(self, node: ast.stmt) -> bool:
        """Follow a statement, and return True if it ends the function."""
        match node:
            case ast.Assign(targets=targets, value=value):
                result = self.value(value)
                for target in targets:
                    self._assign(target, result)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self._assign(target, self.value(value))
            case ast.AugAssign(target=ast.Name(id=name), op=op, value=value) if type(op) in OPERATORS:
                left = self.value(ast.Name(id=name))
                function = OPERATORS[type(op)]
                if isinstance(left, torch.Tensor):
                    function = IN_PLACE.get(type(op), function)
                self.variables[name] = operated(function, left, self.value(value))
            case ast.Expr(value=value):
                self.value(value)
            case ast.Return(value=value):
                self.result = None if value is None else self.value(value)
                return True
            case ast.For(target=target, iter=source, body=body, orelse=[]):
                for item in _items(self.value(source)):
                    self._assign(target, item)
                    if self.block(body):
                        return True
            case ast.If(test=test, body=body, orelse=others):
                return self.block(body if self.value(test) else others)
            case ast.With(items=[ast.withitem(context_expr=ast.Call(func=function))], body=body):
                if self.value(function) not in map(_Path, CONTEXTS):
                    raise ValueError(f"unsupported: with {ast.unparse(function)[:60]}")
                return self.block(body)
            case ast.Import() | ast.ImportFrom() | ast.FunctionDef():
                self._program.define(node)
            case ast.Assert() | ast.Pass() | ast.Delete():
                pass
            case _:
                raise ValueError(f"unsupported statement: {type(node).__name__}")
        return False

    def _assign(self, target: ast.expr, value: Any) -> None:
        match target:
            case ast.Name(id=name):
                self.variables[name] = value
            case ast.Tuple(elts=targets) | ast.List(elts=targets):
                items = _items(value)
                if len(items) != len(targets):
                    raise ValueError(f"{len(items)} values for {len(targets)} names")
                for inner, item in zip(targets, items, strict=True):
                    self._assign(inner, item)
            case ast.Subscript(value=holder, slice=index):
                tensor = self.value(holder)
                if not isinstance(tensor, torch.Tensor):
                    raise ValueError("unsupported: an assignment to an element")
                tensor[self.value(index)] = value
            case _:
                raise ValueError(f"unsupported: an assignment to {type(target).__name__}")

    def value(self, node: ast.expr) -> Any:
        """Return the value of an expression; raise `ValueError` if it is not one that is read."""
        self._program.step()
        match node:
            case ast.Constant(value=None | bool() | int() | float() | complex() | str() as value):
                return checked(value)
            case ast.Constant(value=value) if value is Ellipsis:
                return value
            case ast.Name(id=name):
                value = self.variables[name] if name in self.variables else self._program.named(name)
                if isinstance(value, _Missing):
                    raise ValueError(value.reason)
                return CONSTANTS.get(value.name, value) if isinstance(value, _Path) else value
            case ast.Tuple(elts=items):
                return tuple(map(self.value, items))
            case ast.List(elts=items):
                return list(map(self.value, items))
            case ast.Slice(lower=lower, upper=upper, step=step):
                return slice(*(None if part is None else self.value(part) for part in (lower, upper, step)))
            case ast.Attribute(value=holder, attr=name):
                return self._attribute(self.value(holder), name)
            case ast.Subscript(value=holder, slice=index):
                return self._element(self.value(holder), self.value(index))
            case ast.BinOp(left=left, op=op, right=right):
                return operated(OPERATORS[type(op)], self.value(left), self.value(right))
            case ast.UnaryOp(op=op, operand=operand):
                return operated(OPERATORS[type(op)], self.value(operand))
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in OPERATORS:
                return operated(OPERATORS[type(op)], self.value(left), self.value(right))
            case ast.BoolOp(op=op, values=values):
                return self._joined(isinstance(op, ast.And), values)
            case ast.IfExp(test=test, body=body, orelse=other):
                return self.value(body if self.value(test) else other)
            case ast.ListComp(elt=element, generators=[ast.comprehension(target=target, iter=source, ifs=[])]):
                results = []
                for item in _items(self.value(source)):
                    self._assign(target, item)
                    results.append(self.value(element))
                return results
            case ast.Call(func=function, args=args, keywords=words):
                if any(word.arg is None for word in words):
                    raise ValueError("unsupported: arguments in a dictionary")
                kwargs = {str(word.arg): self.value(word.value) for word in words}
                return self._call(self.value(function), [*map(self.value, args)], kwargs)
        raise ValueError(f"unsupported expression: {ast.unparse(node)[:60]}")

    def _joined(self, is_and: bool, values: Sequence[ast.expr]) -> Any:
        result: Any = is_and
        for node in values:
            result = self.value(node)
            if bool(result) is not is_and:
                break
        return result

    def _attribute(self, value: Any, name: str) -> Any:
        if isinstance(value, _Path):
            path = f"{value.name}.{name}"
            return CONSTANTS.get(path, _Path(path))
        if isinstance(value, torch.Tensor):
            if name in ATTRIBUTES:
                return getattr(value, name)
            if name == "item" and hasattr(value, ITEM):
                return partial(getattr, value, ITEM)
            if name in OPERATOR_METHODS:
                return partial(OPERATOR_METHODS[name], value)
            if f"torch.Tensor.{name}" in functions():
                return partial(self._method, f"torch.Tensor.{name}", value)
            if name in ("is_cuda", "is_floating_point"):
                return name == "is_cuda"
        if name in OF_RESULTS and isinstance(value, tuple | torch.finfo | torch.iinfo) and hasattr(value, name):
            return getattr(value, name)
        raise ValueError(f"unsupported attribute: {name[:60]}")

    def _element(self, value: Any, index: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value[index]
        if not isinstance(value, list | tuple) or not isinstance(index, int | slice):
            raise ValueError("unsupported: an element of a value that is not a list or tensor")
        return value[index]

    def _call(self, function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        match function:
            case partial():
                return function(*args, **kwargs)
            case ast.FunctionDef():
                return self._program.inner_call(function, args, kwargs)
            case _Path(name=name):
                return run_function(name, self._program.recording, args, kwargs)
        raise ValueError("unsupported: a call of a value")

    def _method(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return run_function(name, self._program.recording, args, kwargs)


def _items(value: Any) -> Sequence[Any]:
    if isinstance(value, torch.Tensor):
        value = value.unbind(0)
    if not isinstance(value, list | tuple | range) or len(value) > PIECES:
        raise ValueError("unsupported: a loop over this value")
    return value
