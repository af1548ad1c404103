"""Generate `traces/schema.json`, the JSON Schema of traces, from the record types.

Types and descriptions of fields come from the record declarations. The definitions of header, value models and
accelerators, whose fields no record declares, are kept from the existing file.

    python docs/trace_schema.py
"""

from __future__ import annotations

import json
import re
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import torch
from msgspec import Meta

from opgrip.traces.codec.call_blocks import CallsForm, Column
from opgrip.traces.codec.record_forms import RECORDS
from opgrip.traces.schema.arguments import KINDS, MADE_OF
from opgrip.traces.schema.json_values import LIMIT, Argument, key_of
from opgrip.traces.schema.records import PHASES, Calls, OpenedSignature
from opgrip.traces.schema.tensor_specs import AnyMadeOf, AnyPart, TensorSpec

PATH = Path(__file__).resolve().parents[1] / "traces" / "schema.json"
DECLARED_IN_FILE = ("header", "values", "accelerator", "number", "special_float", "complex")
REFERENCES = {
    Argument: "argument",
    AnyMadeOf: "made_of",
    AnyPart: "tensor",
    TensorSpec: "tensor",
    OpenedSignature: "signature",
}
ANY_INTEGER = ("since_ns", "start_ns", "after_ns", "storages", "streams", "zero_point", "seed", "rank")
SIGNED: dict[str, int | None] = {**dict.fromkeys(ANY_INTEGER), "device_ns": -1, "newest": -1}
"""minimum of the integers that can be negative, by field; None for no minimum"""
SPECIAL = {
    ("scope", "phase"): {"enum": list(PHASES)},
    ("end", "accelerator"): {"$ref": "#/$defs/accelerator"},
    ("entered", "start_ns"): {"type": "integer", "minimum": 0},
    ("kernels", "device_ns"): {"type": "array", "items": {"type": "integer", "minimum": 0}},
}
"""schema parts that Python types cannot express"""
TYPES = {int: "integer", float: "number", str: "string", bool: "boolean", NoneType: "null", bytes: "string"}


def schema_of(hint: Any, least: int | None = 0) -> dict[str, Any]:
    """Return the schema of a type, with `least` as the minimum of its integers."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        schema = schema_of(arguments[0], least)
        for meta in arguments[1:]:
            if isinstance(meta, Meta):
                schema |= _constraints(meta, schema)
        return schema
    if hint in REFERENCES:
        return {"$ref": f"#/$defs/{REFERENCES[hint]}"}
    if hint is Any:
        return {}
    if hint in (torch.dtype, torch.layout):
        return {"type": "string"}
    if hint is int:
        return {"type": "integer"} | ({} if least is None else {"minimum": least})
    if hint in TYPES:
        return {"type": TYPES[hint]}
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (Union, UnionType):
        schemas = [schema_of(item, least) for item in arguments]
        return {"anyOf": schemas}
    if origin is dict:
        return {"type": "object", "additionalProperties": schema_of(arguments[1], least)}
    if origin is tuple and arguments[-1] is not ...:
        items = [schema_of(item, least) for item in arguments]
        return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
    if origin in (list, tuple):
        return {"type": "array", "items": schema_of(arguments[0], least)}
    assert is_dataclass(hint), hint
    return object_of(hint)


def _constraints(meta: Meta, schema: dict[str, Any]) -> dict[str, Any]:
    constraints: dict[str, Any] = {}
    if meta.pattern is not None:
        constraints["pattern"] = meta.pattern.replace(r"\Z", "$")
    if meta.ge is not None and meta.ge != -LIMIT:
        constraints["minimum"] = max(meta.ge, schema.get("minimum", meta.ge))
    if meta.le is not None and meta.le != LIMIT - 1:
        constraints["maximum"] = meta.le
    return constraints


def object_of(kind: Any, name: str | None = None) -> dict[str, Any]:
    """Return the schema of a dataclass, or of a record with this name."""
    summary, described = _documentation(kind)
    properties: dict[str, Any] = {} if name is None else {"type": {"const": name}}
    hints = get_type_hints(kind, include_extras=True)
    required = list(properties)
    for field in fields(kind):
        key = key_of(field)
        schema = SPECIAL.get((name or "", key)) or schema_of(
            _without_none(hints[field.name], field), SIGNED.get(key, 0)
        )
        about = described.get(field.name)
        properties[key] = ({"description": about} if about else {}) | schema
        if field.default is MISSING and field.default_factory is MISSING:
            required.append(key)
    form = {"description": summary, "type": "object", "properties": properties, "required": required}
    return form if name else form | {"additionalProperties": True}


def _without_none(hint: Any, field: Field[Any]) -> Any:
    """Return the type of a field that is left out if it is None."""
    metadata: list[Any] = []
    if get_origin(hint) is Annotated:
        hint, *metadata = get_args(hint)
    if field.default is None and NoneType in get_args(hint):
        (hint,) = (item for item in get_args(hint) if item is not NoneType)
    return Annotated[(hint, *metadata)] if metadata else hint


def _documentation(kind: type) -> tuple[str, dict[str, str]]:
    """Return a docstring's summary, and the descriptions of its attributes by name."""
    summary, _, attributes = (kind.__doc__ or "").partition("\n\n")
    described: dict[str, str] = {}
    for names, about in re.findall(r"^    (\w[\w, ]*) : ((?:.|\n(?=     ))*)", attributes, re.MULTILINE):
        plain = " ".join(about.split()).replace("None", "null")
        described.update((name, plain) for name in names.split(", "))
    return " ".join(summary.split()), described


def calls_schema() -> dict[str, Any]:
    """Return the schema of a block of calls, whose columns are encoded in the file."""
    described = _documentation(Calls)[1] | _documentation(CallsForm)[1]
    hints = get_type_hints(CallsForm, include_extras=True)
    properties: dict[str, Any] = {"type": {"const": "calls"}}
    for key, hint in hints.items():
        if key in CallsForm.__struct_encode_fields__:
            column = list[int] if hint is Column else hint
            properties[key] = {"description": described[key]} if key in described else {}
            properties[key] |= schema_of(column, SIGNED.get(key, 0))
    required = ["type", "thread", "start_ns", "signature", "scope", "after_ns", "duration_ns"]
    return {"description": _documentation(Calls)[0], "type": "object", "properties": properties, "required": required}


def argument_schema() -> dict[str, Any]:
    """Return the schema of an argument: a plain JSON value, or an object that names its kind."""
    kinds = []
    for name, kind in KINDS.items():
        body = schema_of(TensorSpec if kind.form is None else kind.form, None if name in ("slice", "range") else 0)
        if kind.type is torch.Size or name == "generator":
            body.pop("description", None)
        kinds.append({"type": "object", "properties": {name: body}, "required": [name], "additionalProperties": False})
    plain = [
        {"type": ["null", "boolean", "number", "string"]},
        {"type": "array", "items": {"$ref": "#/$defs/argument"}},
    ]
    about = "A value that an operator or a function takes. Floats have a fraction or exponent, integers have none."
    return {"description": about, "anyOf": [*plain, *kinds]}


def made_of_schema() -> dict[str, Any]:
    """Return the schema of a tensor's components: an object that names the kind."""
    kinds = [
        {"type": "object", "properties": {name: object_of(kind)}, "required": [name], "additionalProperties": False}
        for name, kind in MADE_OF.items()
    ]
    return {"description": "what a sparse, quantized or nested tensor consists of", "anyOf": kinds}


def trace_schema() -> dict[str, Any]:
    """Return the schema of all records."""
    schema: dict[str, Any] = json.loads(PATH.read_text(encoding="utf-8"))
    kept = {name: schema["$defs"][name] for name in DECLARED_IN_FILE}
    records = {
        name: calls_schema() if kind is Calls else object_of(kind, name)
        for name, kind in RECORDS.items()
        if name not in DECLARED_IN_FILE
    }
    others = {"argument": argument_schema(), "tensor": object_of(TensorSpec), "made_of": made_of_schema()}
    schema["oneOf"] = [{"$ref": f"#/$defs/{name}"} for name in RECORDS]
    return schema | {"$defs": kept | records | others}


def main() -> None:
    """Write the file."""
    PATH.write_text(json.dumps(trace_schema(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
