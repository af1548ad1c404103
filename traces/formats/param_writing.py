"""Write calls of a trace as operator configurations, and find the calls that a configuration makes."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import IO, Any

import torch

from opgrip.traces.formats.configurations.generators import Arguments
from opgrip.traces.formats.configurations.generators.default import DTYPE_OF
from opgrip.traces.formats.configurations.modules import Recorded, Recording, is_function, module_names
from opgrip.traces.formats.configurations.plan import GENERATOR
from opgrip.traces.formats.overloads import Bound, NoOverload, bind, schemas_of
from opgrip.traces.formats.schema_text import SchemaText, parse_schema
from opgrip.traces.io.foreign_files import Losses
from opgrip.traces.schema.arguments import TensorSpec, tensors
from opgrip.traces.schema.records import OPERATOR, Signature
from opgrip.traces.schema.tensor_specs import MEMORY_FORMATS, contiguous
from opgrip.traces.table.trace import Trace

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
    schema = parse_schema(text)
    if schema is None:
        raise ValueError("a schema that cannot be read")
    return schema


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


NAME_OF = {dtype: name for name, dtype in DTYPE_OF.items()}
ALIAS = re.compile(r"(?<=Tensor)\([^)]*\)")
"""What a schema says of memory that a tensor shares: some readers of schemas stumble over `Tensor(a -> *)`."""
SYMBOLIC = "SymInt"
"""What the dispatcher calls a whole number that TorchScript calls an int."""


def write(trace: Trace, file: IO[bytes], losses: Losses) -> None:
    """Operators in their alphabetical order; of each overload a configuration, of each signature an entry.

    An operator's schema stands in the `build` section, and all its arguments, defaults too, in their order, as the
    other tool calls operators. How often a signature was called stands as `count`, which that tool passes over.
    """
    signatures = {signature.number: signature for signature in trace.signatures}
    own = trace.own_calls
    # by name, schema and arguments: signatures that differ in what the format does not say are one entry
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
    """The text of a call's schema and its arguments; raises `ValueError` where the format has none."""
    if signature.kind != OPERATOR:
        raise ValueError("it is no operator of torch's dispatcher")
    namespace, _, rest = signature.op.partition(".")
    schema = next(iter(schemas_of(f"{namespace}::{rest}")), None)
    if schema is None:
        raise ValueError("it is not registered here, so its schema is not known")
    args = [_form(parameter.name, value) for parameter, value in _all_arguments(schema, signature)]
    parsed = parse_schema(str(schema))
    assert parsed is not None, "a schema of torch"
    return parsed.text(_plain_type), args


def _plain_type(text: str) -> str:
    """A type as TorchScript's: without what the dispatcher adds."""
    return ALIAS.sub("", text).replace(SYMBOLIC, "int")


def _all_arguments(schema: Any, signature: Signature) -> Iterator[tuple[Any, Any]]:
    """Each parameter of the operator with its value, its default where the call left it out."""
    if len(signature.args) > len(schema.arguments):
        raise ValueError("it has more arguments than its schema here")
    for place, parameter in enumerate(schema.arguments):
        if place < len(signature.args):
            yield parameter, signature.args[place]
        elif parameter.name in signature.kwargs:
            yield parameter, signature.kwargs[parameter.name]
        elif parameter.has_default_value():
            yield parameter, parameter.default_value
        else:
            raise ValueError(f"it lacks its argument {parameter.name}")


def _form(name: str, value: Any) -> dict[str, Any]:
    """An argument as the format has it."""
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
    raise ValueError(f"the format has no {type(value).__name__} of this kind")


def _code(name: str, value: Any) -> dict[str, Any]:
    """The whole number that TorchScript has for a dtype, layout or memory format."""
    codes = list(CODES.get(name.removeprefix("out_"), ()))
    if value not in codes:
        raise ValueError(f"the format has no {value}")
    return {"type": "int", "value": codes.index(value), "name": name}


def _lost(signature: Signature) -> Iterator[str]:
    """What an entry does not say of a call."""
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
