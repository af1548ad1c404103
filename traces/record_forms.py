"""The records of a trace as the JSON objects that stand in the file.

`to_json` and `from_json` are each other's inverse. `from_json` checks what it reads: whatever it returns has the
types that its record declares.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import pairwise
from sys import float_info
from typing import Any, TypeVar

from opgrip.traces.arguments import FormatError, Json, Opaque, TensorSpec, decode, encode
from opgrip.traces.limits import NAME_LENGTH
from opgrip.traces.records import (
    FORMAT,
    KINDS,
    MAJOR,
    MINOR,
    Calls,
    Context,
    DeviceTimes,
    Dropped,
    Effects,
    End,
    Entered,
    Header,
    Kernels,
    Observed,
    Record,
    Scope,
    Signature,
    Thread,
    Values,
)
from opgrip.traces.storage_codes import decode_storages, encode_storages
from opgrip.traces.values import value_model_from_json, value_model_to_json, value_models

LIMIT = 1 << 63
"""Bound of the whole numbers in a trace."""
LARGEST = float_info.max
"""Of the numbers in what is kept as it stands."""

T = TypeVar("T")


def to_json(record: Record) -> dict[str, Json]:
    """The JSON object of a record."""
    return _TO_JSON[type(record)](record)


def from_json(form: Mapping[str, Json]) -> Record | None:
    """The record of a JSON object; None for a type of record or value model that this version does not know.

    Raises
    ------
    FormatError : for an object that is not what its type asks for
    """
    reader = _FROM_JSON.get(form.get("type", ""))
    if reader is None or (reader is _values_from_json and value_models.get(str(form.get("model"))) is None):
        return None
    try:
        return reader(form)
    except FormatError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise FormatError(f"not a whole {form['type']} record: {reason}") from error


def unknown_fields(form: Mapping[str, Json]) -> list[str]:
    """Fields of a known type of record that this version does not know; a header may hold any."""
    known_fields = _FIELDS.get(form["type"])
    return [] if known_fields is None else [name for name in form if name not in known_fields]


def _header_to_json(record: Header) -> dict[str, Json]:
    return {"type": "header", "format": FORMAT, "version": f"{MAJOR}.{MINOR}", **record.fields}


def _header_from_json(form: Mapping[str, Json]) -> Header:
    _check_finite(form)
    return Header({name: value for name, value in form.items() if name != "type"})


def _signature_to_json(record: Signature) -> dict[str, Json]:
    form: dict[str, Json] = {"type": "signature", "id": record.number, "kind": record.kind, "op": record.op}
    form["args"] = [encode(item) for item in record.args]
    if record.kwargs:
        form["kwargs"] = {name: encode(item) for name, item in record.kwargs.items()}
    if record.raised is None:
        form["outputs"] = encode(record.outputs)
    else:
        form["raised"] = record.raised
    return form


def _signature_from_json(form: Mapping[str, Json]) -> Signature:
    kind = _text(form["kind"])
    if kind not in KINDS:
        raise FormatError(f"a signature of unknown kind {kind[:60]!r}")
    kwargs = form.get("kwargs", {})
    if not isinstance(kwargs, dict) or not isinstance(form["args"], list):
        raise FormatError("a signature whose arguments are not a list and an object")
    return Signature(
        number=_integer(form["id"]),
        kind=kind,
        op=_text(form["op"]),
        args=tuple(decode(item) for item in form["args"]),
        kwargs={_text(name): decode(item) for name, item in kwargs.items()},
        outputs=decode(form["outputs"]) if "outputs" in form else Opaque("not recorded"),
        raised=_optional(_text, form.get("raised")),
    )


def _observed_to_json(record: Observed) -> dict[str, Json]:
    numbers = {"signature": record.signature, "values": record.values}
    return {"type": "observed", **numbers, "outputs": encode(record.outputs)}


def _observed_from_json(form: Mapping[str, Json]) -> Observed:
    values = form["values"]
    if not isinstance(values, list):
        raise FormatError("values of a call that are no list")
    numbers = [_optional(_integer, number) for number in values]
    return Observed(_integer(form["signature"]), numbers, decode(form["outputs"]))


def _effects_to_json(record: Effects) -> dict[str, Json]:
    form: dict[str, Json] = {"type": "effects", "signature": record.signature}
    form |= {"operators": record.operators, "operator_ns": record.operator_ns}
    if record.after is not None:
        form["after"] = encode(record.after)
    if record.random_state is not None:
        form["random_state"] = encode(record.random_state)
    return form


def _effects_from_json(form: Mapping[str, Json]) -> Effects:
    after = _optional(decode, form.get("after"))
    state = _optional(decode, form.get("random_state"))
    if state is not None and not isinstance(state, TensorSpec):
        raise FormatError("a random state that is no tensor")
    if after is not None:
        args, kwargs = after
        if not isinstance(args, tuple) or not isinstance(kwargs, dict):
            raise FormatError("arguments after a call that are no positional and named ones")
    return Effects(
        *(_integer(form["signature"]), _integer(form["operators"]), _integer(form["operator_ns"])),
        *(after, state),
    )


def _scope_to_json(record: Scope) -> dict[str, Json]:
    form: dict[str, Json] = {"type": "scope", "id": record.number, "module": record.module}
    form |= {"module_type": record.module_type, "phase": record.phase}
    if record.inside is not None:
        form["inside"] = record.inside
    if record.function:
        form |= {"function": record.function, "file": record.file, "line": record.line}
    if record.callers:
        form["callers"] = list(record.callers)
    if record.context is not None:
        form["context"] = record.context
    if record.forward is not None:
        form["forward"] = record.forward
    if record.gripped:
        form["gripped"] = True
    return form


def _scope_from_json(form: Mapping[str, Json]) -> Scope:
    return Scope(
        number=_integer(form["id"]),
        module=_text(form["module"]),
        module_type=_text(form["module_type"]),
        phase=_text(form["phase"]),
        inside=_optional(_text, form.get("inside")),
        function=_text(form.get("function", "")),
        file=_text(form.get("file", "")),
        line=_integer(form.get("line", 0)),
        callers=tuple(_text(caller) for caller in form.get("callers", ())),
        context=_optional(_integer, form.get("context")),
        forward=_optional(_integer, form.get("forward")),
        gripped=_boolean(form.get("gripped", False)),
    )


def _context_to_json(record: Context) -> dict[str, Json]:
    return {"type": "context", "id": record.number, "settings": record.settings}


def _context_from_json(form: Mapping[str, Json]) -> Context:
    settings = form["settings"]
    if not isinstance(settings, dict) or any(isinstance(value, dict | list) for value in settings.values()):
        raise FormatError("a context whose settings are not an object of plain values")
    _check_finite(settings)
    return Context(_integer(form["id"]), settings)


def _values_to_json(record: Values) -> dict[str, Json]:
    form = {"type": "values", "id": record.number, **value_model_to_json(record.model)}
    return form if record.tensor is None else form | {"tensor": record.tensor}


def _values_from_json(form: Mapping[str, Json]) -> Values:
    return Values(_integer(form["id"]), value_model_from_json(form), _optional(_key, form.get("tensor")))


def _thread_to_json(record: Thread) -> dict[str, Json]:
    form: dict[str, Json] = {"type": "thread", "id": record.number, "name": record.name}
    return form if record.process is None else form | {"process": record.process}


def _thread_from_json(form: Mapping[str, Json]) -> Thread:
    return Thread(_integer(form["id"]), _text(form["name"]), _optional(_integer, form.get("process")))


def _calls_to_json(record: Calls) -> dict[str, Json]:
    starts = record.start_ns
    after = [later - earlier for earlier, later in pairwise(starts)]
    form: dict[str, Json] = {
        "type": "calls",
        "thread": record.thread,
        "start_ns": starts[0] if starts else 0,
        "signature": record.signature,
        "scope": record.scope,
        "after_ns": [0, *after] if starts else [],
        "duration_ns": record.duration_ns,
        "tensors": record.tensors,
        "newest": record.newest,
        "storages": encode_storages(record.storages, record.newest),
    }
    if record.device_ns:
        form["device_ns"] = record.device_ns
    if record.page_faults:
        form["page_faults"] = [list(pair) for pair in record.page_faults]
    if any(record.streams):
        form["streams"] = record.streams
    return form


def _calls_from_json(form: Mapping[str, Json]) -> Calls:
    columns = [_integers(form[name]) for name in ("signature", "scope", "after_ns", "duration_ns")]
    if len({len(column) for column in columns}) != 1:
        raise FormatError("a block of calls whose columns differ in length")
    start = _integer(form["start_ns"])
    starts = _integers([start := start + after for after in columns[2]])
    tensors, newest = _integers(form.get("tensors", [])), _integer(form.get("newest", -1))
    storages = _integers(decode_storages(_integers(form.get("storages", [])), newest))
    if tensors and (len(tensors) != len(starts) or min(tensors) < 0 or sum(tensors) != len(storages)):
        raise FormatError("a block of calls whose storages are not those of its calls")
    device_ns, streams = (_integers(form.get(name, [])) for name in ("device_ns", "streams"))
    if not {len(device_ns), len(streams)} <= {0, len(starts)}:
        raise FormatError("a block of calls whose columns differ in length")
    return Calls(
        *(_integer(form["thread"]), columns[0], columns[1], starts, columns[3]),
        *(tensors, storages, newest, device_ns, _page_faults(form.get("page_faults", []), len(starts))),
        streams,
    )


def _page_faults(pairs: Json, calls: int) -> list[tuple[int, int]]:
    if not isinstance(pairs, list):
        raise FormatError("page faults that are no list")
    counted = [_integers(pair) for pair in pairs]
    if any(len(pair) != 2 or not 0 <= pair[0] < calls or pair[1] < 0 for pair in counted):
        raise FormatError("page faults of calls that are not in their block")
    return [(place, count) for place, count in counted]


def _device_times_to_json(record: DeviceTimes) -> dict[str, Json]:
    return {"type": "device_times", "thread": record.thread, "first": record.first, "device_ns": record.device_ns}


def _device_times_from_json(form: Mapping[str, Json]) -> DeviceTimes:
    first = _integer(form["first"])
    if first < 0:
        raise FormatError("device times of a call before the first")
    return DeviceTimes(_integer(form["thread"]), first, _integers(form["device_ns"]))


def _kernels_to_json(record: Kernels) -> dict[str, Json]:
    form: dict[str, Json] = {"type": "kernels", "signature": record.signature, "names": record.names}
    return form | {"launches": record.launches, "device_ns": record.device_ns}


def _kernels_from_json(form: Mapping[str, Json]) -> Kernels:
    names, launches, times = form["names"], _integers(form["launches"]), _integers(form["device_ns"])
    if not isinstance(names, list) or not len(names) == len(launches) == len(times):
        raise FormatError("kernels whose columns differ in length")
    if min([*launches, *times], default=0) < 0:
        raise FormatError("kernels with a count or a time below 0")
    return Kernels(_integer(form["signature"]), [_text(name) for name in names], launches, times)


def _entered_to_json(record: Entered) -> dict[str, Json]:
    form: dict[str, Json] = {"type": "entered", "thread": record.thread, "start_ns": record.start_ns}
    form |= {"scope": record.scope, "signature": record.signature}
    return form if record.opened is None else form | {"opened": _signature_to_json(record.opened)}


def _entered_from_json(form: Mapping[str, Json]) -> Entered:
    return Entered(
        thread=_integer(form["thread"]),
        start_ns=_integer(form["start_ns"]),
        scope=_integer(form["scope"]),
        signature=_integer(form["signature"]),
        opened=_optional(_signature_from_json, form.get("opened")),
    )


def _end_to_json(record: End) -> dict[str, Json]:
    form: dict[str, Json] = {"type": "end", "calls": record.calls, "signatures": record.signatures}
    form |= {"duration_ns": record.duration_ns, "dropped": _dropped_to_json(record.dropped)}
    form["passed_by"] = _dropped_to_json(record.passed_by)
    if record.stopped is not None:
        form["stopped"] = record.stopped
    if record.devices:
        form["devices"] = dict(record.devices)
    if record.accelerator:
        form["accelerator"] = dict(record.accelerator)
    return form | {"without_values": _dropped_to_json(record.without_values)}


def _dropped_to_json(dropped: list[Dropped]) -> list[dict[str, Json]]:
    return [{"op": item.op, "reason": item.reason, "count": item.count} for item in dropped]


def _end_from_json(form: Mapping[str, Json]) -> End:
    return End(
        calls=_integer(form["calls"]),
        signatures=_integer(form["signatures"]),
        duration_ns=_integer(form["duration_ns"]),
        dropped=_dropped_from_json(form["dropped"]),
        passed_by=_dropped_from_json(form.get("passed_by", [])),
        without_values=_dropped_from_json(form.get("without_values", [])),
        stopped=_optional(_text, form.get("stopped")),
        devices={_text(device): _text(name) for device, name in form.get("devices", {}).items()},
        accelerator=_facts(form.get("accelerator", {})),
    )


def _facts(form: Mapping[str, Json]) -> dict[str, Json]:
    _check_finite(form)
    return {_text(name): value for name, value in form.items()}


def _dropped_from_json(items: list[Mapping[str, Json]]) -> list[Dropped]:
    return [Dropped(_text(item["op"]), _text(item["reason"]), _integer(item["count"])) for item in items]


def _check_finite(tree: Json) -> None:
    """Raise `FormatError` for numbers too large for a float, which no file can hold again, or nobody reckon with."""
    level = [tree]
    while level:
        item = level.pop()
        if isinstance(item, dict | list):
            level += item.values() if isinstance(item, dict) else item
        elif isinstance(item, int | float) and not -LARGEST <= item <= LARGEST:
            raise FormatError("a number that no float holds")


def _integer(value: Json) -> int:
    if type(value) is not int or not -LIMIT <= value < LIMIT:
        raise FormatError(f"{str(value)[:60]!r} stands where a whole number of 64 bits should")
    return value


def _integers(value: Json) -> list[int]:
    if not isinstance(value, list):
        raise FormatError(f"{str(value)[:60]!r} stands where a list of whole numbers should")
    return [_integer(item) for item in value]


def _boolean(value: Json) -> bool:
    if type(value) is not bool:
        raise FormatError(f"{str(value)[:60]!r} stands where true or false should")
    return value


def _text(value: Json) -> str:
    if not isinstance(value, str):
        raise FormatError(f"{str(value)[:60]!r} stands where text should")
    if len(value) > NAME_LENGTH:
        raise FormatError(f"a name of {len(value):,} characters")
    return value


def _key(value: Json) -> str:
    if re.fullmatch("[0-9a-f]{32,128}", _text(value)) is None:
        raise FormatError(f"{value[:60]!r} stands where the key of a tensor should")
    return str(value)


def _optional(read: Callable[[Any], T], value: Json) -> T | None:
    return None if value is None else read(value)


_TO_JSON: dict[type, Callable[[Any], dict[str, Json]]] = {
    Header: _header_to_json,
    Signature: _signature_to_json,
    Observed: _observed_to_json,
    Effects: _effects_to_json,
    Scope: _scope_to_json,
    Context: _context_to_json,
    Values: _values_to_json,
    Thread: _thread_to_json,
    Calls: _calls_to_json,
    DeviceTimes: _device_times_to_json,
    Kernels: _kernels_to_json,
    Entered: _entered_to_json,
    End: _end_to_json,
}

_FROM_JSON: dict[str, Callable[[Mapping[str, Json]], Record]] = {
    "header": _header_from_json,
    "signature": _signature_from_json,
    "observed": _observed_from_json,
    "effects": _effects_from_json,
    "scope": _scope_from_json,
    "context": _context_from_json,
    "values": _values_from_json,
    "thread": _thread_from_json,
    "calls": _calls_from_json,
    "device_times": _device_times_from_json,
    "kernels": _kernels_from_json,
    "entered": _entered_from_json,
    "end": _end_from_json,
}

_FIELDS: dict[str, set[str]] = {
    "signature": {"type", "id", "kind", "op", "args", "kwargs", "outputs", "raised"},
    "scope": {
        *("type", "id", "module", "module_type", "phase", "inside", "function", "file", "line", "callers", "context"),
        *("forward", "gripped"),
    },
    "context": {"type", "id", "settings"},
    "observed": {"type", "signature", "values", "outputs"},
    "effects": {"type", "signature", "operators", "operator_ns", "after", "random_state"},
    "thread": {"type", "id", "name", "process"},
    "calls": {
        *("type", "thread", "start_ns", "signature", "scope", "after_ns", "duration_ns", "tensors", "storages"),
        *("newest", "device_ns", "page_faults", "streams"),
    },
    "device_times": {"type", "thread", "first", "device_ns"},
    "kernels": {"type", "signature", "names", "launches", "device_ns"},
    "entered": {"type", "thread", "start_ns", "scope", "signature", "opened"},
    "end": {"type", "calls", "signatures", "duration_ns", "dropped", "passed_by", "without_values", "stopped"}
    | {"devices", "accelerator"},
}
