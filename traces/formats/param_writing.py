"""Writes the calls of a trace as operator configurations."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import IO, Any

import torch

from opgrip.traces.formats.configurations.generators.default import DTYPE_OF
from opgrip.traces.formats.configurations.plan import GENERATOR
from opgrip.traces.formats.configurations.schema_text import SchemaText, parse_schema
from opgrip.traces.formats.overloads import schemas_of
from opgrip.traces.formats.param_calls import CODES
from opgrip.traces.io.foreign_files import Losses
from opgrip.traces.schema.arguments import TensorSpec, tensors
from opgrip.traces.schema.records import OPERATOR, Signature
from opgrip.traces.schema.tensor_specs import contiguous
from opgrip.traces.table.trace import Trace

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
        name = schema.name.partition(".")[0]
        entries.setdefault(name, {}).setdefault(str(schema), Counter())[json.dumps(args)] += len(calls)
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


def _entry_of(signature: Signature) -> tuple[SchemaText, list[dict[str, Any]]]:
    """The schema of a call and its arguments; raises `ValueError` where the format has none."""
    if signature.kind != OPERATOR:
        raise ValueError("it is no operator of torch's dispatcher")
    namespace, _, rest = signature.op.partition(".")
    schema = next(iter(schemas_of(f"{namespace}::{rest}")), None)
    if schema is None:
        raise ValueError("it is not registered here, so its schema is not known")
    args = [_form(parameter.name, value) for parameter, value in _all_arguments(schema, signature)]
    text = parse_schema(str(schema))
    return SchemaText(text.name, tuple(map(_plain_type, text.types)), text.names, _plain_type(text.returns)), args


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
