"""Conversion of a trace's records to and from the JSON objects of its file, according to their field declarations."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from hashlib import blake2b
from typing import Any

from opgrip.traces.codec.call_blocks import calls_from_json, calls_to_json, json_keys_of_calls
from opgrip.traces.schema.arguments import (
    FormatError,
    Json,
    Opaque,
    TensorSpec,
    encode,
    fields_form,
    map_leaves,
    numbers_of,
    with_numbers,
)
from opgrip.traces.schema.json_values import Count, TensorKey, check_finite, convert, json_keys, readers, writers
from opgrip.traces.schema.records import (
    FORMAT,
    MAJOR,
    MINOR,
    Calls,
    Context,
    DeviceTimes,
    Effects,
    End,
    Entered,
    Graph,
    GraphTimes,
    Header,
    Kernels,
    Observed,
    OpenedSignature,
    Record,
    Scope,
    Signature,
    Thread,
    Values,
    Wait,
)
from opgrip.traces.values import value_model_from_json, value_model_to_json, value_models

# record types by their names in the file
RECORDS: dict[str, type] = {
    "header": Header,
    "signature": Signature,
    "observed": Observed,
    "effects": Effects,
    "scope": Scope,
    "context": Context,
    "values": Values,
    "thread": Thread,
    "calls": Calls,
    "device_times": DeviceTimes,
    "kernels": Kernels,
    "graph": Graph,
    "graph_times": GraphTimes,
    "wait": Wait,
    "entered": Entered,
    "end": End,
}
_NAMES = {kind: name for name, kind in RECORDS.items()}


def to_json(record: Record) -> dict[str, Json]:
    match record:
        case Header():
            return {"type": "header", "format": FORMAT, "version": f"{MAJOR}.{MINOR}", **record.fields}
        case Calls():
            return calls_to_json(record)
        case Values():
            form = {"type": "values", "id": record.number, **value_model_to_json(record.model)}
            return form if record.tensor is None else form | {"tensor": record.tensor}
    form = {"type": _NAMES[type(record)], **fields_form(record)}
    if isinstance(record, Signature) and record.raised is not None:
        del form["outputs"]
    return form


def from_json(form: Mapping[str, Json]) -> Record | None:
    """Return the record of a JSON object, or None for an unknown type of record or value model."""
    name = form.get("type", "")
    kind = RECORDS.get(name)
    if kind is None or (kind is Values and value_models.get(str(form.get("model"))) is None):
        return None
    try:
        if kind in _READERS:
            return _READERS[kind](form)
        record = convert(form, kind, name)
        if kind in _CHECKS:
            _CHECKS[kind](record)
        return record  # type: ignore[no-any-return]
    except FormatError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise FormatError(f"cannot read a record of type {name}: {error}") from error


def unknown_fields(form: Mapping[str, Json]) -> list[str]:
    fields = _FIELDS.get(form["type"])
    return [] if fields is None else [name for name in form if name != "type" and name not in fields]


_FIELDS = {name: set(json_keys(kind)) for name, kind in RECORDS.items() if kind not in (Header, Values, Calls)}
_FIELDS["calls"] = json_keys_of_calls()


def _read_header(form: Mapping[str, Json]) -> Header:
    check_finite(form)
    return Header({name: value for name, value in form.items() if name != "type"})


def _read_values(form: Mapping[str, Json]) -> Values:
    number, tensor = convert(form.get("id"), Count, "values.id"), form.get("tensor")
    key = None if tensor is None else convert(tensor, TensorKey, "values.tensor")
    return Values(number, value_model_from_json(form), key)


def _check_effects(record: Effects) -> None:
    if record.random_state is not None and not isinstance(record.random_state, TensorSpec):
        raise FormatError("effects.random_state of a call is not a tensor")
    if record.after is not None:
        args, kwargs = record.after
        if not isinstance(args, tuple) or not isinstance(kwargs, dict):
            raise FormatError("effects.after of a call is not a pair of positional and named arguments")


def _check_kernels(record: Kernels) -> None:
    if not len(record.names) == len(record.launches) == len(record.device_ns):
        raise FormatError("names, launches and device_ns of a record of kernels differ in length")


def _check_graph(record: Graph) -> None:
    if not len(record.calls) == len(record.scope) == len(record.tensors):
        raise FormatError("calls, scope and tensors of a record of a graph differ in length")
    if sum(record.tensors) != len(record.storages):
        raise FormatError(f"a graph has {len(record.storages)} storage numbers for {sum(record.tensors)} tensors")
    if record.signature in record.calls:
        raise FormatError(f"a graph contains its own launch, signature {record.signature}")


_READERS: dict[type, Callable[[Mapping[str, Json]], Record]] = {
    Header: _read_header,
    Values: _read_values,
    Calls: calls_from_json,
}
_CHECKS: dict[type, Callable[[Any], None]] = {
    Context: lambda record: check_finite(record.settings),
    Effects: _check_effects,
    End: lambda record: check_finite(record.accelerator),
    Graph: _check_graph,
    Kernels: _check_kernels,
}
readers[OpenedSignature] = lambda form: convert(form, Signature, "opened")
writers[OpenedSignature] = to_json


DIGITS = 6  # number of bytes in a key: two of a million cases have equal keys with a probability of 1/500

# settings that affect the result of a call; the others describe the machine or can be chosen at a replay
OF_CONTEXT = ("autocast", "default_dtype", "deterministic")


def key_of_case(signature: Signature, context: Mapping[str, Any]) -> str:
    """Return a key for a call's operator, arguments and the settings in `OF_CONTEXT`, without tensors' values."""
    arguments = (signature.args, signature.kwargs)
    args, kwargs = map_leaves(_as_recordable, with_numbers(arguments, [None] * len(numbers_of(arguments))))
    signature = replace(signature, number=0, args=args, kwargs=kwargs, outputs=None, raised=None, registered_by=None)
    call = to_json(signature)
    identity = {"call": call, "context": {name: context.get(name) for name in OF_CONTEXT}}
    return blake2b(json.dumps(identity, sort_keys=True, default=str).encode(), digest_size=DIGITS).hexdigest()


def key_of_part(key: str, *places: str) -> str:
    return blake2b(json.dumps([key, *places]).encode(), digest_size=DIGITS).hexdigest()


def _as_recordable(leaf: Any) -> Any:
    try:
        encode(leaf)
    except TypeError:
        return Opaque(type(leaf).__qualname__)
    return leaf
