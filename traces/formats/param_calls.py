"""Which calls of registered operators the operator of a configuration makes, by its name and its schema's text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from opgrip.traces.formats.configurations.generators import Arguments
from opgrip.traces.formats.configurations.modules import Recorded, Recording, is_function, module_names
from opgrip.traces.formats.configurations.schema_text import SchemaText, parse_schema
from opgrip.traces.formats.overloads import Bound, NoOverload, bind, schemas_of
from opgrip.traces.schema.arguments import TensorSpec
from opgrip.traces.schema.torch_names import MEMORY_FORMATS

SPACES = ("special", "linalg", "fft")
"""Modules of torch whose functions are operators with the module's name before theirs."""
DTYPE_CODES = (
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64),
    *(torch.complex32, torch.complex64, torch.complex128, torch.bool, torch.qint8, torch.quint8, torch.qint32),
    torch.bfloat16,
)
"""dtypes by the whole numbers that TorchScript has for them, from 0 on."""
CODES: dict[str, Sequence[Any]] = {
    "dtype": DTYPE_CODES,
    "layout": [torch.strided, torch.sparse_coo],
    "memory_format": [
        MEMORY_FORMATS[name] for name in ("contiguous_format", "preserve_format", "channels_last", "channels_last_3d")
    ],
}
"""What a whole number stands for, by the parameter's name."""

NUMBER = TensorSpec((), (), torch.float64, "cpu")
"""Stands for a number in the place of a tensor."""


def calls_of(name: str, build: Arguments | None, arguments: Arguments, recording: Recording) -> Iterator[Recorded]:
    """The calls of one case.

    Parameters
    ----------
    name : `aten::add`, `torch.add`, `torch.nn.Linear`, `pytorch.model.resnet`
    build : arguments of the `build` section, where there is one: of a module's class, or an operator's schema as text
    recording : runs what is no operator without memory, to see which it calls

    Raises
    ------
    ValueError : where there is no such operator, or it does not take these arguments
    """
    if name in module_names():
        yield from recording.module(name, build or Arguments(), arguments)
        return
    schema = _schema_of(build)
    if schema is not None:
        yield _call(_bind_by_text(schema, arguments))
        return
    operator = operator_name(name)
    try:
        yield _call(_bind(operator, arguments))
    except NoOverload:
        if not is_function(name):
            raise
        yield from recording.function(name, arguments)


def _call(bound: Bound) -> Recorded:
    return Recorded(bound.op, bound.args, bound.kwargs)


def _schema_of(build: Arguments | None) -> SchemaText | None:
    if build is None or not (build.args or build.kwargs):
        return None
    text = next(iter((*build.args, *build.kwargs.values())))
    if not isinstance(text, str):
        raise ValueError("it is no module, and its build section no schema")
    return parse_schema(text)


def operator_name(name: str) -> str:
    """The operator that a function is, as far as names tell: `torch.nn.functional.relu` is `aten::relu`."""
    if "::" in name:
        return name
    parts = name.removeprefix("torch.ops.").split(".")
    if not name.startswith("torch.") or name.startswith("torch.ops."):
        return "::".join((parts[0], ".".join(parts[1:]))) if len(parts) > 1 else name
    if len(parts) == 3 and parts[1] in SPACES:
        return f"aten::{parts[1]}_{parts[2]}"
    return f"aten::{parts[-1]}"


def _bind(name: str, arguments: Arguments) -> Bound:
    return _with_types(bind(name, arguments.args, arguments.kwargs))


def _bind_by_text(schema: SchemaText, arguments: Arguments) -> Bound:
    """The call of the overload that a text describes: positions mean the names that the text gives them."""
    if len(arguments.args) > len(schema.names):
        raise NoOverload(f"{schema.name} takes {len(schema.names)} arguments, not {len(arguments.args)}")
    named = dict(zip(schema.names, arguments.args, strict=False))
    if not set(named).isdisjoint(arguments.kwargs):
        raise NoOverload("an argument is given twice")
    try:
        bound = _bind_overload(_with_overload(schema.name), named | arguments.kwargs)
    except NoOverload as first:
        try:
            # a text of another version may call its parameters otherwise
            bound = bind(schema.name.partition(".")[0], arguments.args, arguments.kwargs)
        except NoOverload:
            raise first from None
    return _without_defaults(_with_types(bound))


def _bind_overload(name: str, named: dict[str, Any]) -> Bound:
    """The call of a named overload, whose tensors may be numbers: torch makes tensors of these itself."""
    kinds = {item.name: item.type.kind() for schema in schemas_of(name) for item in schema.arguments}
    numbers = {key: value for key, value in named.items() if kinds.get(key) == "TensorType" and _is_number(value)}
    bound = bind(name, (), named | dict.fromkeys(numbers, NUMBER))
    if not numbers:
        return bound
    (schema,) = schemas_of(name)[:1]
    args = tuple(numbers.get(item.name, value) for item, value in zip(schema.arguments, bound.args, strict=False))
    return Bound(bound.op, args, {key: numbers.get(key, value) for key, value in bound.kwargs.items()})


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | complex)


def _with_overload(name: str) -> str:
    return name if "." in name else f"{name}.default"


def _with_types(bound: Bound) -> Bound:
    """The call with dtypes, layouts and memory formats in place of the numbers that stand for them."""
    (schema,) = schemas_of(_dispatcher_name(bound.op))[:1]
    names = [parameter.name for parameter in schema.arguments]
    args = tuple(_typed(name, value) for name, value in zip(names, bound.args, strict=False))
    return Bound(bound.op, args, {name: _typed(name, value) for name, value in bound.kwargs.items()})


def _typed(name: str, value: Any) -> Any:
    types = CODES.get(name.removeprefix("out_"))
    if types is None or type(value) is not int:
        return value
    if not 0 <= value < len(types):
        raise ValueError(f"a {name} of number {value}, which there is not")
    return types[value]


def _without_defaults(bound: Bound) -> Bound:
    """The call as the dispatcher passes it on: without what is as the schema has it anyway."""
    (schema,) = schemas_of(_dispatcher_name(bound.op))[:1]
    parameters = {parameter.name: parameter for parameter in schema.arguments}
    args = list(bound.args)
    for parameter in reversed(schema.arguments[: len(args)]):
        if not is_default(parameter, args[-1]):
            break
        args.pop()
    kwargs = {name: value for name, value in bound.kwargs.items() if not is_default(parameters[name], value)}
    return Bound(bound.op, tuple(args), kwargs)


def is_default(parameter: Any, value: Any) -> bool:
    """Whether an argument is what its parameter has by default, with the same type."""
    if not parameter.has_default_value():
        return False
    default = parameter.default_value
    return bool(_plain(default) == _plain(value))


def _plain(value: Any) -> Any:
    """The value with its type, so that 1 is not True."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return type(value), value


def _dispatcher_name(op: str) -> str:
    namespace, _, rest = op.partition(".")
    return f"{namespace}::{rest}"
