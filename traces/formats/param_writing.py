"""Writer of a trace's calls as PARAM operator configurations, and conversion of such configurations to calls."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import IO, Any

import torch

from opgrip.traces.formats.configurations.generators import DTYPE_OF, GENERATOR, Arguments
from opgrip.traces.formats.configurations.modules import MetaRecording, Recorded, is_function, module_names
from opgrip.traces.formats.nodes import DTYPE_OF_CODE, LAYOUT_OF_CODE, MEMORY_FORMAT_OF_CODE
from opgrip.traces.formats.operator_schemas import (
    Bound,
    NoOverload,
    SchemaText,
    bind,
    operator_name,
    parse_schema,
    schemas_of,
    without_defaults,
)
from opgrip.traces.io.foreign_files import Losses
from opgrip.traces.schema.arguments import TensorSpec, tensors
from opgrip.traces.schema.records import OPERATOR, Signature
from opgrip.traces.schema.tensor_specs import contiguous
from opgrip.traces.table.trace import Trace

# values by their integer codes in TorchScript, by parameter name
CODES: dict[str, dict[int, Any]] = {
    "dtype": DTYPE_OF_CODE,
    "layout": LAYOUT_OF_CODE,
    "memory_format": MEMORY_FORMAT_OF_CODE,
}


def calls_of(name: str, build: Arguments | None, arguments: Arguments, recording: MetaRecording) -> Iterator[Recorded]:
    """Yield the operators that one case of a configuration calls.

    name : `aten::add`, `torch.add`, `torch.nn.Linear`, `pytorch.model.resnet`
    build : content of the `build` section: the arguments of a module's class, or an operator's schema as text; None
        without the section
    recording : runs functions on meta tensors to find the operators that they call

    Raise `ValueError` if the operator does not exist or does not accept these arguments.
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
        raise ValueError(f"the entry names no module, and its `build` has no operator schema but {str(text)[:40]}")
    schema = parse_schema(text)
    if schema is None:
        raise ValueError(f"the build section is not an operator schema: {text[:60]!r}")
    return schema


def _bind(name: str, arguments: Arguments) -> Bound:
    return _with_types(bind(name, arguments.args, arguments.kwargs))


def _bind_by_text(schema: SchemaText, arguments: Arguments) -> Bound:
    """Return the call of the overload that a schema's text names; the arguments have the names in this text."""
    if len(arguments.args) > len(schema.names):
        raise NoOverload(f"{schema.name} takes {len(schema.names)} arguments, not {len(arguments.args)}")
    named = dict(zip(schema.names, arguments.args, strict=False))
    if not set(named).isdisjoint(arguments.kwargs):
        raise NoOverload(f"{schema.name} has an argument by position and by name")
    try:
        bound = bind(_with_overload(schema.name), (), named | arguments.kwargs)
    except NoOverload as first:
        try:
            # text from another version may use other parameter names
            bound = bind(schema.name.partition(".")[0], arguments.args, arguments.kwargs)
        except NoOverload:
            raise first from None
    return without_defaults(_with_types(bound))


def _with_overload(name: str) -> str:
    return name if "." in name else f"{name}.default"


def _with_types(bound: Bound) -> Bound:
    """Return a call with integer codes replaced by the dtypes, layouts and memory formats that they represent."""
    (schema,) = schemas_of(bound.op)[:1]
    names = [parameter.name for parameter in schema.arguments]
    args = tuple(_typed(name, value) for name, value in zip(names, bound.args, strict=False))
    return Bound(bound.op, args, {name: _typed(name, value) for name, value in bound.kwargs.items()})


def _typed(name: str, value: Any) -> Any:
    types = CODES.get(name.removeprefix("out_"))
    if types is None or type(value) is not int:
        return value
    if value not in types:
        raise ValueError(f"unknown {name} with the number {value}")
    return types[value]


NAME_OF = {dtype: name for name, dtype in DTYPE_OF.items()}
# pattern of alias sets in a schema; they are removed because some readers cannot parse `Tensor(a -> *)`
ALIAS = re.compile(r"(?<=Tensor)\([^)]*\)")
SYMBOLIC = "SymInt"  # the dispatcher's type of integers, which TorchScript calls `int`


def write(trace: Trace, file: IO[bytes], losses: Losses) -> None:
    """Write operators in alphabetical order, with a configuration per overload and an entry per signature.

    The `build` section holds the operator's schema, and the entry all arguments in order, including defaults, as PARAM
    requires. The number of calls of a signature is written as `count`, which PARAM ignores.
    """
    signatures = {signature.number: signature for signature in trace.signatures}
    own = trace.own_calls
    # by name, schema and arguments: signatures that differ only in metadata that the format lacks share an entry
    entries: dict[str, dict[str, Counter[str]]] = {}
    for number, calls in own.groupby("signature", sort=True).groups.items():
        signature = signatures[int(number)]  # type: ignore[call-overload]
        try:
            schema, args = _entry_of(signature)
        except ValueError as error:
            losses.skip(signature.op, str(error), len(calls))
            continue
        name = schema.partition("(")[0].partition(".")[0]
        entries.setdefault(name, {}).setdefault(schema, Counter())[json.dumps(args)] += len(calls)
        lost = ", ".join(_lost(signature))
        for call in calls:
            losses.lose(int(call), signature.op, lost)
    file.write(b"{")
    for place, (name, configs) in enumerate(sorted(entries.items())):
        file.write(b",\n" if place else b"\n")
        file.write(f"{json.dumps(name)}: ".encode())
        file.write(json.dumps(_operator(configs), indent=1).encode())
    file.write(b"\n}\n")


def _operator(configs: dict[str, Counter[str]]) -> dict[str, Any]:
    sections = []
    for schema, inputs in configs.items():
        build = [{"args": [{"type": "str", "value": schema}]}]
        sections.append({"build": build, "input": [_entry(json.loads(args), count) for args, count in inputs.items()]})
    return {"build_data_generator": GENERATOR, "input_data_generator": GENERATOR, "config": sections}


def _entry(args: list[Any], count: int) -> dict[str, Any]:
    return {"args": args, "count": count} if count > 1 else {"args": args}


def _entry_of(signature: Signature) -> tuple[str, list[dict[str, Any]]]:
    """Return the schema's text and the arguments of a call; raise `ValueError` if the format cannot hold them."""
    if signature.kind != OPERATOR:
        raise ValueError("not an operator of torch's dispatcher")
    schema = next(iter(schemas_of(signature.op)), None)
    if schema is None:
        raise ValueError("not registered in this torch, so its schema is unknown")
    args = [_form(parameter.name, value) for parameter, value in _all_arguments(schema, signature)]
    parsed = parse_schema(str(schema))
    assert parsed is not None, "a schema of torch"
    return parsed.text(_plain_type), args


def _plain_type(text: str) -> str:
    """Return the type that TorchScript's schemas have for a type of the dispatcher."""
    return ALIAS.sub("", text).replace(SYMBOLIC, "int")


def _all_arguments(schema: Any, signature: Signature) -> Iterator[tuple[Any, Any]]:
    """Yield each parameter of the schema with its argument in the signature, or its default."""
    if len(signature.args) > len(schema.arguments):
        raise ValueError(f"{signature.op} takes {len(schema.arguments)} arguments, not {len(signature.args)}")
    for place, parameter in enumerate(schema.arguments):
        if place < len(signature.args):
            yield parameter, signature.args[place]
        elif parameter.name in signature.kwargs:
            yield parameter, signature.kwargs[parameter.name]
        elif parameter.has_default_value():
            yield parameter, parameter.default_value
        else:
            raise ValueError(f"{signature.op} lacks its argument {parameter.name}")


def _form(name: str, value: Any) -> dict[str, Any]:
    match value:
        case None:
            return {"type": "none"}
        case bool():
            return {"type": "bool", "value": value}
        case int():
            return {"type": "int", "value": value}
        case float():
            return {"type": "float", "value": value}
        case str():
            return {"type": "str", "value": value}
        case torch.device():
            return {"type": "device", "value": str(value)}
        case torch.dtype() | torch.layout() | torch.memory_format():
            return _code(name, value)
        case list() | torch.Size():
            return {"type": "genericlist", "value": [_form("", item) for item in value]}
        case tuple():
            return {"type": "tuple", "value": [_form("", item) for item in value]}
        case TensorSpec(layout=torch.strided, made_of=None, cls=None, dtype=dtype) if dtype in NAME_OF:
            about = {"type": "tensor", "dtype": NAME_OF[dtype], "shape": list(value.shape)}
            return {**about, "requires_grad": value.requires_grad}
        case TensorSpec(layout=torch.strided, made_of=None, cls=None):
            raise ValueError(f"the format has no tensors of {str(value.dtype).removeprefix('torch.')}")
    raise ValueError(f"the format cannot represent a value of type {type(value).__name__}")


def _code(name: str, value: Any) -> dict[str, Any]:
    """Return the JSON object of an argument that TorchScript stores as an integer: a dtype, layout or memory format."""
    for code, item in CODES.get(name.removeprefix("out_"), {}).items():
        if item == value:
            return {"type": "int", "value": code, "name": name}
    raise ValueError(f"the format has no code for {value}")


def _lost(signature: Signature) -> Iterator[str]:
    """Yield the properties of a signature that the configuration's entry for it lacks."""
    yield "time and place in the program"
    specs = list(tensors([signature.args, signature.kwargs]))
    if any(spec.stride != contiguous(spec.shape) or spec.offset for spec in specs):
        yield "strides"
    if any(spec.device != "cpu" for spec in specs):
        yield "devices"
    if any(spec.storage is not None for spec in specs):
        yield "shared memory"
    if any(spec.values is not None for spec in specs):
        yield "values"
