"""Which overload of an operator a call was of, where a file names the operator and its arguments alone."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from opgrip.traces.io.foreign_files import Losses
from opgrip.traces.schema.arguments import GeneratorSpec, TensorSpec

NAME = re.compile(r"([A-Za-z]\w*)(?:::|\.)([A-Za-z_]\w*)(?:\.([A-Za-z_]\w*))?")
"""`aten::add`, `aten::add.Tensor`, `aten.add.default`."""
MOST_NOTES = 50
"""Overloads of older torch that are told of."""
NAME_OF_OVERLOAD = re.compile(r"(?:::|\.)[A-Za-z_]\w*\.[A-Za-z_]\w*$")


class NoOverload(ValueError):
    """That no registered operator takes a call, by the reason."""


@dataclass(frozen=True, slots=True)
class Bound:
    """A call of an overload.

    Attributes
    ----------
    op : its name in a trace, `aten.add.Tensor`
    args : positional arguments
    kwargs : those that are given by name alone
    """

    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def bind(name: str, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> Bound:
    """The overload that a call was of.

    Parameters
    ----------
    name : with or without its overload; a name without a namespace is of aten
    args, kwargs : values and `TensorSpec`; what the schema takes by name alone may stand among `args`

    Raises
    ------
    NoOverload : where no operator of that name is registered, or none of its overloads takes these
    """
    schemas = schemas_of(name)
    if not schemas:
        raise NoOverload(f"not registered in torch {torch.__version__.partition('+')[0]}")
    reasons = []
    for schema in schemas:
        result = _bind(schema, args, dict(kwargs or {}), NAME_OF_OVERLOAD.search(name) is not None)
        if isinstance(result, Bound):
            return result
        reasons.append(result)
    raise NoOverload(reasons[0] if len(reasons) == 1 else "no overload takes these arguments")


def registered(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], losses: Losses) -> Bound:
    """A call as a file names it; where this torch has no such overload, of the one that takes its arguments.

    Older torch had overloads that later ones replaced, `aten.sum.SymInt`. A name that nothing stands for stays.
    A device may be its name.

    Parameters
    ----------
    losses : has, among the defaults, which overloads were replaced
    """
    as_named = Bound(name, tuple(args), _with_device(kwargs))
    packet, _, overload = name.rpartition(".")
    if _is_registered(name) or "." not in packet:
        return as_named
    try:
        call = bind(packet, args, as_named.kwargs)
    except NoOverload:
        return as_named
    note = f"{name}: torch has no overload {overload} of it, so it is {call.op}"
    if note not in losses.defaults and len(losses.defaults) < MOST_NOTES:
        losses.defaults.append(note)
    return call


def _with_device(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments whose device is one, so that a replay elsewhere puts it there: operators take its name, too."""
    device = kwargs.get("device")
    if isinstance(device, str):
        try:
            return {**kwargs, "device": torch.device(device)}
        except RuntimeError:
            pass
    return dict(kwargs)


@lru_cache(maxsize=4096)
def _is_registered(name: str) -> bool:
    return bool(schemas_of(name))


def schemas_of(name: str) -> list[Any]:
    """What torch says of an operator's overloads, those of the dispatcher before those of TorchScript alone."""
    match = NAME.fullmatch(name if re.search(r"::|\.", name) else f"aten::{name}")
    if match is None:
        return []
    namespace, packet, overload = match.groups()
    schemas = torch._C._jit_get_schemas_for_operator(f"{namespace}::{packet}")
    if overload is not None:
        schemas = [item for item in schemas if (item.overload_name or "default") == overload]
    return sorted(schemas, key=lambda schema: not _is_dispatched(schema))


def op_of(schema: Any) -> str:
    """An overload's name in a trace."""
    return f"{schema.name.replace('::', '.')}.{schema.overload_name or 'default'}"


def _is_dispatched(schema: Any) -> bool:
    name = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
    try:
        return bool(torch._C._dispatch_has_kernel(name))
    except RuntimeError:
        return False


def _bind(schema: Any, args: Sequence[Any], kwargs: dict[str, Any], is_named: bool) -> Bound | str:
    """A call of an overload, or why it is none.

    Parameters
    ----------
    is_named : whether the file named the overload: then a number may stand for a tensor, as torch lets it
    """
    parameters = schema.arguments
    if len(args) > len(parameters):
        return f"{op_of(schema)} takes {len(parameters)} arguments, not {len(args)}"
    values = dict(zip((parameter.name for parameter in parameters), args, strict=False))
    for name, value in kwargs.items():
        if name in values:
            return f"{name} is given twice"
        values[name] = value
    names = {parameter.name for parameter in parameters}
    if unknown := [name for name in values if name not in names]:
        return f"{op_of(schema)} has no argument {unknown[0]}"
    positional: list[Any] = []
    named: dict[str, Any] = {}
    for parameter in parameters:
        if parameter.name not in values:
            if not parameter.has_default_value():
                return f"{op_of(schema)} lacks its argument {parameter.name}"
            continue
        value = values[parameter.name]
        is_number = is_named and type(value) in (bool, int, float, complex) and parameter.type.kind() == "TensorType"
        if not is_number and not _fits(value, parameter.type, parameter.N):
            return f"{op_of(schema)} does not take its argument {parameter.name}"
        if parameter.kwarg_only or len(positional) < parameters.index(parameter):
            named[parameter.name] = value
        else:
            positional.append(value)
    return Bound(op_of(schema), tuple(positional), named)


def _fits(value: Any, kind: Any, length: int | None = None) -> bool:
    """Whether a parameter takes a value.

    Parameters
    ----------
    length : of a list that one number stands for; None where none does
    """
    name = kind.kind()
    if name == "OptionalType":
        return value is None or _fits(value, kind.getElementType(), length)
    if name == "ListType":
        inner = kind.getElementType()
        if isinstance(value, list | tuple):
            return all(_fits(item, inner) for item in value)
        return length is not None and _fits(value, inner)
    types = _TYPES.get(name)
    return types is None or (isinstance(value, types) and (type(value) is not bool or bool in types))


_TYPES: dict[str, tuple[type, ...]] = {
    "TensorType": (TensorSpec,),
    # dtypes, layouts and memory formats are numbers there
    "IntType": (int, torch.dtype, torch.layout, torch.memory_format),
    "SymIntType": (int,),
    "FloatType": (float, int),
    "ComplexType": (complex, float, int),
    "NumberType": (int, float, complex, bool),
    "BoolType": (bool,),
    "StringType": (str,),
    "DeviceObjType": (torch.device,),
    "GeneratorType": (GeneratorSpec,),
}
