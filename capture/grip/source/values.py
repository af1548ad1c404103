"""Constants of a sample, and the expressions that recreate their values."""

from __future__ import annotations

import argparse
import ast
import collections
import enum
import functools
import logging
import math
import pathlib
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from textwrap import fill
from types import (
    BuiltinFunctionType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
    NoneType,
    SimpleNamespace,
    UnionType,
)
from typing import Any, Union, get_args, get_origin

import numpy as np
import torch

from opgrip.capture.grip.source.free_names import FreeNames, Role
from opgrip.capture.grip.source.live_objects import (
    ABSENT,
    FunctionDefinition,
    Namespace,
    SourceFile,
    evaluate,
    is_bound,
    is_imported,
    resolve,
)
from opgrip.traces.values.model import array_of

MOST_ELEMENTS = 256  # maximum number of elements of tensors and arrays that are written as source

_DEEPEST = 20
_WIDTH = 100

# function that returns the name of a class, function or module in the sample; raises `Inexpressible` if it has none
Refer = Callable[[Any], str]


class Inexpressible(Exception):
    pass


def express(value: Any, refer: Refer, column: int = 0) -> str:
    """Return source that creates a value; raise `Inexpressible` if that is not possible."""
    return _Writer(refer).write(value, column)


@dataclass(frozen=True, slots=True)
class _Text:
    text: str


@dataclass(frozen=True, slots=True)
class _Key:
    value: Any


@dataclass(frozen=True, slots=True)
class _Call:
    called: Any
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Group:
    opening: str
    closing: str
    entries: list[tuple[str | _Key, Any]]
    is_single: bool = False


class _Writer:
    def __init__(self, refer: Refer) -> None:
        self.refer = refer
        self._depth = 0

    def write(self, value: Any, column: int = 0, indent: int = 0) -> str:
        if self._depth > _DEEPEST:
            raise Inexpressible(f"a value nested more than {_DEEPEST} levels deep")
        self._depth += 1
        try:
            form = self._form(value)
            return form if isinstance(form, str) else self._lay_out(form, column, indent)
        finally:
            self._depth -= 1

    def _form(self, value: Any) -> str | _Group:
        if isinstance(value, _Text):
            return value.text
        if isinstance(value, _Call):
            return self._call(value.called, *value.arguments, **value.keywords)
        if value is None or value is ...:
            return "None" if value is None else "..."
        if get_origin(value) is not None:
            return self._alias(value)
        if isinstance(value, ModuleType | type) or _is_function(value):
            return self.refer(value)
        for kind, form in _FORMS:
            if isinstance(value, kind):
                return form(self, value)
        return self._container(value)

    def _lay_out(self, group: _Group, column: int, indent: int) -> str:
        entries = [self._entry(key, value, 0, 0) for key, value in group.entries]
        flat = f"{group.opening}{', '.join(entries)}{',' * group.is_single}{group.closing}"
        if "\n" not in flat and column + len(flat) <= _WIDTH:
            return flat
        margin = " " * (indent + 4)
        if all(isinstance(value, int | float) for _, value in group.entries):
            inside = fill(", ".join(entries) + ",", _WIDTH, initial_indent=margin, subsequent_indent=margin) + "\n"
        else:
            broken = [self._entry(key, value, indent + 4, indent + 4) for key, value in group.entries]
            inside = "".join(f"{margin}{entry},\n" for entry in broken)
        return f"{group.opening}\n{inside}{' ' * indent}{group.closing}"

    def _entry(self, key: str | _Key, value: Any, column: int, indent: int) -> str:
        head = key if isinstance(key, str) else f"{self.write(key.value, column, indent)}: "
        return head + self.write(value, column + len(head), indent)

    def _call(self, called: Any, *values: Any, **keywords: Any) -> _Group:
        name = called.text if isinstance(called, _Text) else self.refer(called)
        named = [(f"{keyword}=", value) for keyword, value in keywords.items()]
        return _Group(f"{name}(", ")", [*(("", value) for value in values), *named])

    def _reference_to(self, module: ModuleType, name: str) -> _Text:
        return _Text(f"{self.refer(module)}.{name}")

    def _container(self, value: Any) -> _Group:
        kind = type(value)
        if kind is list:
            return _Group("[", "]", [("", one) for one in value])
        if kind is tuple:
            return _Group("(", ")", [("", one) for one in value], is_single=len(value) == 1)
        if kind is dict:
            return _Group("{", "}", [(_Key(key), one) for key, one in value.items()])
        if kind is set and value:
            return _Group("{", "}", [("", one) for one in sorted(value, key=repr)])
        if kind in (set, frozenset):
            return self._call(kind, *([set(value)] if value else []))
        if kind is collections.deque:
            return self._call(kind, list(value), **({} if value.maxlen is None else {"maxlen": value.maxlen}))
        if kind in (collections.OrderedDict, collections.Counter):
            return self._call(kind, dict(value))
        if kind is collections.defaultdict:
            return self._call(kind, value.default_factory, dict(value))
        if kind in (SimpleNamespace, argparse.Namespace):
            return self._call(kind, **vars(value))
        if is_dataclass(value) and all(one.init for one in fields(value)):
            return self._call(kind, **{one.name: getattr(value, one.name) for one in fields(value)})
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            return self._call(kind, **dict(zip(kind._fields, value, strict=True)))
        raise Inexpressible(f"an object of class {kind.__module__}.{kind.__qualname__}")

    def member(self, value: enum.Enum) -> str | _Group:
        cls = type(value)
        if value.name in cls.__members__:
            return f"{self.refer(cls)}.{value.name}"
        return self._call(cls, value.value)

    def number(self, value: Any) -> str | _Group:
        if isinstance(value, bool):
            return repr(value)
        if isinstance(value, int):
            return repr(int(value))
        if isinstance(value, complex):
            return self._call(complex, value.real, value.imag)
        return repr(float(value)) if math.isfinite(value) else f'float("{float(value)}")'

    def words(self, value: str | bytes) -> str:
        if not is_imported(type(value).__module__):
            raise Inexpressible(f"an object of class {type(value).__module__}.{type(value).__qualname__}")
        text = repr(str(value) if isinstance(value, str) else bytes(value))
        inside = text[1:-1]
        return f'"{inside}"' if text.startswith("'") and '"' not in inside and "\\'" not in inside else text

    def torch_word(self, value: object) -> str:
        return repr(value).replace("torch", self.refer(torch), 1)

    def device(self, value: torch.device) -> _Group:
        return self._call(self._reference_to(torch, "device"), str(value))

    def tensor(self, value: torch.Tensor) -> str | _Group:
        if type(value) is not torch.Tensor or value.layout is not torch.strided or value.is_quantized:
            raise Inexpressible(f"a tensor of class {type(value).__qualname__} and layout {value.layout}")
        if value.numel() > MOST_ELEMENTS:
            raise Inexpressible(f"a tensor of {value.numel():,} elements, more than {MOST_ELEMENTS}")
        keywords: dict[str, Any] = {"dtype": value.dtype}
        if value.device.type != "cpu":
            keywords["device"] = str(value.device)
        if value.requires_grad:
            keywords["requires_grad"] = True
        if not value.numel():
            return self._call(self._reference_to(torch, "empty"), tuple(value.shape), **keywords)
        plain = value.detach().cpu()
        values = array_of(plain).astype(str).tolist() if plain.dtype is torch.float32 else plain.tolist()
        return self._call(self._reference_to(torch, "tensor"), _as_floats(values), **keywords)

    def array(self, value: np.ndarray[Any, Any]) -> _Group:
        if value.dtype.hasobject or value.dtype.names or value.size > MOST_ELEMENTS or type(value) is not np.ndarray:
            raise Inexpressible(f"an array of {value.size:,} elements of {value.dtype}")
        if not value.size:
            return self._call(self._reference_to(np, "empty"), value.shape, dtype=str(value.dtype))
        return self._call(self._reference_to(np, "array"), value.tolist(), dtype=str(value.dtype))

    def scalar(self, value: np.generic) -> _Group:
        return self._call(self._reference_to(np, type(value).__name__), value.item())

    def bound(self, value: MethodType | BuiltinFunctionType) -> str:
        if not isinstance(value.__self__, type):
            raise Inexpressible(f"a method of an object of class {type(value.__self__).__qualname__}")
        return f"{self.refer(value.__self__)}.{value.__name__}"

    def descriptor(self, value: MethodDescriptorType) -> str:
        cls = torch.Tensor if issubclass(torch.Tensor, value.__objclass__) else value.__objclass__
        return f"{self.refer(cls)}.{value.__name__}"

    def partial(self, value: functools.partial[Any]) -> _Group:
        return self._call(functools.partial, value.func, *value.args, **value.keywords)

    def pattern(self, value: re.Pattern[Any]) -> _Group:
        flags = int(value.flags & ~re.UNICODE)
        return self._call(self._reference_to(re, "compile"), value.pattern, *([flags] if flags else []))

    def logger(self, value: logging.Logger) -> _Group:
        return self._call(self._reference_to(logging, "getLogger"), value.name)

    def path(self, value: pathlib.PurePath) -> _Group:
        return self._call(pathlib.Path if isinstance(value, pathlib.Path) else pathlib.PurePath, str(value))

    def _alias(self, value: Any) -> str:
        origin, parameters = get_origin(value), [None if one is NoneType else one for one in get_args(value)]
        if origin in (Union, UnionType):
            return " | ".join(map(self.write, parameters))
        return f"{self.write(origin)}[{', '.join(map(self.write, parameters))}]"


_FORMS: tuple[tuple[Any, Callable[[_Writer, Any], str | _Group]], ...] = (
    (enum.Enum, _Writer.member),
    (np.generic, _Writer.scalar),
    (int | float | complex, _Writer.number),
    (str | bytes, _Writer.words),
    (slice | range, lambda _, value: repr(value)),
    (torch.device, _Writer.device),
    (torch.dtype | torch.layout | torch.memory_format | torch.Size, _Writer.torch_word),
    (torch.Tensor, _Writer.tensor),
    (np.ndarray, _Writer.array),
    (functools.partial, _Writer.partial),
    (MethodType | BuiltinFunctionType, _Writer.bound),
    (MethodDescriptorType, _Writer.descriptor),
    (re.Pattern, _Writer.pattern),
    (logging.Logger, _Writer.logger),
    (pathlib.PurePath, _Writer.path),
)


def _as_floats(values: Any) -> Any:
    if isinstance(values, list):
        return [_as_floats(one) for one in values]
    return float(values) if isinstance(values, str) else values


def _is_function(value: Any) -> bool:
    named = callable(value) and isinstance(getattr(value, "__name__", None), str)
    return named and not isinstance(value, MethodDescriptorType | functools.partial) and not is_bound(value)


def express_class(cls: type, refer: Refer) -> str:
    writer = _Writer(refer)
    if cls.__bases__ == (enum.Enum,):
        members = {name: member.value for name, member in cls.__members__.items()}  # type: ignore[attr-defined]
        return writer.write(_Call(enum.Enum, (cls.__name__, members), {}))
    if cls.__bases__ != (tuple,) or not hasattr(cls, "_field_defaults"):
        raise Inexpressible(f"the class {cls.__qualname__}")
    fields_of, defaults = list(cls._fields), list(cls._field_defaults.values())  # type: ignore[attr-defined]
    keywords = {"defaults": defaults} if defaults else {}
    return writer.write(_Call(collections.namedtuple, (cls.__name__, fields_of), keywords))


def statement_of(name: str, file: SourceFile, namespace: Namespace) -> ast.Assign | ast.AnnAssign | None:
    if name in namespace.closure:
        return None
    statements: list[ast.Assign | ast.AnnAssign] = []
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Name) and node.id == name and not isinstance(node.ctx, ast.Load):
            around = file.parents[node]
            if next(file.enclosing(node), None) is not None:
                continue
            whole = isinstance(around, ast.Assign) and around.targets == [node]
            if not whole and not (isinstance(around, ast.AnnAssign) and around.value is not None):
                return None
            statements.append(around)  # type: ignore[arg-type]
    return statements[0] if len(statements) == 1 else None


def is_literal(statement: ast.Assign | ast.AnnAssign, value: Any) -> bool:
    if statement.value is None or not is_plain(statement.value):
        return False
    literal = ast.literal_eval(statement.value)
    return type(literal) is type(value) and repr(literal) == repr(value)


def made_by_call(statement: ast.Assign | ast.AnnAssign, namespace: Namespace, value: Any) -> bool:
    """Return True if a statement can create `value` again by a call with literals, such as `nn.ReLU(inplace=True)`."""
    call = statement.value
    if not isinstance(call, ast.Call) or not is_imported(type(value).__module__):
        return False
    if isinstance(value, torch.nn.Module) and any(True for _ in (*value.parameters(), *value.buffers())):
        return False
    maker = evaluate(call.func, namespace)
    arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
    is_made = (isinstance(maker, type) and isinstance(value, maker)) or maker in (threading.Lock, threading.RLock)
    return maker is not ABSENT and is_made and all(map(is_plain, arguments))


def is_filled(statement: ast.Assign | ast.AnnAssign, value: Any) -> bool:
    """Return True for a literal dict, list or set, because the program may have changed it since."""
    return type(value) in (dict, list, set) and statement.value is not None and is_plain(statement.value)


def is_plain(argument: ast.expr) -> bool:
    try:
        ast.literal_eval(argument)
    except (ValueError, TypeError, SyntaxError, MemoryError):
        return False
    return True


def lost_defaults(
    definition: FunctionDefinition, names: FreeNames, namespace: Namespace, cls: type | None
) -> Iterator[tuple[ast.expr, Any]]:
    of_class = vars(cls) if cls is not None else {}
    arguments = definition.node.args
    positional = zip(reversed(arguments.defaults), reversed(definition.function.__defaults__ or ()), strict=False)
    named = [
        (default, (definition.function.__kwdefaults__ or {}).get(parameter.arg))
        for parameter, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if default is not None
    ]
    for expression, value in (*positional, *named):
        inside = {id(part) for part in ast.walk(expression)}
        uses = [use for use in names.uses if use.role is Role.DEFINE and id(use.nodes[0]) in inside]
        lost = any(use.name not in of_class and resolve(use, namespace).thing is ABSENT for use in uses)
        live = evaluate(expression, namespace)
        changed = isinstance(expression, ast.Name) and expression.id not in of_class and live is not value
        if lost or changed:
            yield expression, value
