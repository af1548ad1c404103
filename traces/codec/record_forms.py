"""The records of a trace as the JSON objects that stand in the file.

`to_json` and `from_json` are each other's inverse. `from_json` checks what it reads: whatever it returns has the
types that its record declares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from opgrip.traces.codec.call_forms import (
    calls_from_json,
    calls_to_json,
    device_times_from_json,
    device_times_to_json,
    kernels_from_json,
    kernels_to_json,
)
from opgrip.traces.codec.json_values import boolean, check_finite, elapsed_ns, integer, key, optional, text
from opgrip.traces.schema.arguments import FormatError, Json, Opaque, TensorSpec, decode, encode
from opgrip.traces.schema.records import (
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
from opgrip.traces.values import value_model_from_json, value_model_to_json, value_models


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
    check_finite(form)
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
    kind = text(form["kind"])
    if kind not in KINDS:
        raise FormatError(f"a signature of unknown kind {kind[:60]!r}")
    kwargs = form.get("kwargs", {})
    if not isinstance(kwargs, dict) or not isinstance(form["args"], list):
        raise FormatError("a signature whose arguments are not a list and an object")
    return Signature(
        number=integer(form["id"]),
        kind=kind,
        op=text(form["op"]),
        args=tuple(decode(item) for item in form["args"]),
        kwargs={text(name): decode(item) for name, item in kwargs.items()},
        outputs=decode(form["outputs"]) if "outputs" in form else Opaque("not recorded"),
        raised=optional(text, form.get("raised")),
    )


def _observed_to_json(record: Observed) -> dict[str, Json]:
    numbers = {"signature": record.signature, "values": record.values}
    of_place = {"since_ns": record.since_ns, "storage": record.storage}
    of_place = {name: number for name, number in of_place.items() if number is not None}
    return {"type": "observed", **numbers, "outputs": encode(record.outputs), **of_place}


def _observed_from_json(form: Mapping[str, Json]) -> Observed:
    values = form["values"]
    if not isinstance(values, list):
        raise FormatError("values of a call that are no list")
    numbers = [optional(integer, number) for number in values]
    of_place = [optional(integer, form.get(name)) for name in ("since_ns", "storage")]
    return Observed(integer(form["signature"]), numbers, decode(form["outputs"]), *of_place)


def _effects_to_json(record: Effects) -> dict[str, Json]:
    form: dict[str, Json] = {"type": "effects", "signature": record.signature}
    form |= {"operators": record.operators, "operator_ns": record.operator_ns}
    if record.after is not None:
        form["after"] = encode(record.after)
    if record.random_state is not None:
        form["random_state"] = encode(record.random_state)
    return form


def _effects_from_json(form: Mapping[str, Json]) -> Effects:
    after = optional(decode, form.get("after"))
    state = optional(decode, form.get("random_state"))
    if state is not None and not isinstance(state, TensorSpec):
        raise FormatError("a random state that is no tensor")
    if after is not None:
        args, kwargs = after
        if not isinstance(args, tuple) or not isinstance(kwargs, dict):
            raise FormatError("arguments after a call that are no positional and named ones")
    return Effects(
        *(integer(form["signature"]), integer(form["operators"]), elapsed_ns(form["operator_ns"])),
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
        number=integer(form["id"]),
        module=text(form["module"]),
        module_type=text(form["module_type"]),
        phase=text(form["phase"]),
        inside=optional(text, form.get("inside")),
        function=text(form.get("function", "")),
        file=text(form.get("file", "")),
        line=integer(form.get("line", 0)),
        callers=tuple(text(caller) for caller in form.get("callers", ())),
        context=optional(integer, form.get("context")),
        forward=optional(integer, form.get("forward")),
        gripped=boolean(form.get("gripped", False)),
    )


def _context_to_json(record: Context) -> dict[str, Json]:
    return {"type": "context", "id": record.number, "settings": record.settings}


def _context_from_json(form: Mapping[str, Json]) -> Context:
    settings = form["settings"]
    if not isinstance(settings, dict) or any(isinstance(value, dict | list) for value in settings.values()):
        raise FormatError("a context whose settings are not an object of plain values")
    check_finite(settings)
    return Context(integer(form["id"]), settings)


def _values_to_json(record: Values) -> dict[str, Json]:
    form = {"type": "values", "id": record.number, **value_model_to_json(record.model)}
    return form if record.tensor is None else form | {"tensor": record.tensor}


def _values_from_json(form: Mapping[str, Json]) -> Values:
    return Values(integer(form["id"]), value_model_from_json(form), optional(key, form.get("tensor")))


def _thread_to_json(record: Thread) -> dict[str, Json]:
    form: dict[str, Json] = {"type": "thread", "id": record.number, "name": record.name}
    return form if record.process is None else form | {"process": record.process}


def _thread_from_json(form: Mapping[str, Json]) -> Thread:
    return Thread(integer(form["id"]), text(form["name"]), optional(integer, form.get("process")))


def _entered_to_json(record: Entered) -> dict[str, Json]:
    form: dict[str, Json] = {"type": "entered", "thread": record.thread, "start_ns": record.start_ns}
    form |= {"scope": record.scope, "signature": record.signature}
    return form if record.opened is None else form | {"opened": _signature_to_json(record.opened)}


def _entered_from_json(form: Mapping[str, Json]) -> Entered:
    return Entered(
        thread=integer(form["thread"]),
        start_ns=integer(form["start_ns"]),
        scope=integer(form["scope"]),
        signature=integer(form["signature"]),
        opened=optional(_signature_from_json, form.get("opened")),
    )


def _end_to_json(record: End) -> dict[str, Json]:
    form: dict[str, Json] = {"type": "end", "calls": record.calls, "signatures": record.signatures}
    form |= {"duration_ns": record.duration_ns, "dropped": _dropped_to_json(record.dropped)}
    form["passed_by"] = _dropped_to_json(record.passed_by)
    if record.stopped is not None:
        form["stopped"] = record.stopped
    if record.before is not None:
        form["before"] = record.before
    if record.thinned:
        form["thinned"] = dict(record.thinned)
    if record.contended:
        form["contended"] = record.contended
    if record.step_starts_ns:
        form["step_starts_ns"] = list(record.step_starts_ns)
    if record.devices:
        form["devices"] = dict(record.devices)
    if record.accelerator:
        form["accelerator"] = dict(record.accelerator)
    return form | {"without_values": _dropped_to_json(record.without_values)}


def _dropped_to_json(dropped: list[Dropped]) -> list[dict[str, Json]]:
    return [{"op": item.op, "reason": item.reason, "count": item.count} for item in dropped]


def _end_from_json(form: Mapping[str, Json]) -> End:
    return End(
        calls=integer(form["calls"]),
        signatures=integer(form["signatures"]),
        duration_ns=elapsed_ns(form["duration_ns"]),
        dropped=_dropped_from_json(form["dropped"]),
        passed_by=_dropped_from_json(form.get("passed_by", [])),
        without_values=_dropped_from_json(form.get("without_values", [])),
        stopped=optional(text, form.get("stopped")),
        devices={text(device): text(name) for device, name in form.get("devices", {}).items()},
        accelerator=_facts(form.get("accelerator", {})),
        before=optional(integer, form.get("before")),
        thinned={text(what): integer(count) for what, count in form.get("thinned", {}).items()},
        contended=_share(form.get("contended", 0.0)),
        step_starts_ns=[elapsed_ns(start) for start in form.get("step_starts_ns", [])],
    )


def _share(value: Json) -> float:
    if type(value) not in (int, float) or not 0 <= value <= 1:
        raise FormatError("a share that is not between 0 and 1")
    return float(value)


def _facts(form: Mapping[str, Json]) -> dict[str, Json]:
    check_finite(form)
    return {text(name): value for name, value in form.items()}


def _dropped_from_json(items: list[Mapping[str, Json]]) -> list[Dropped]:
    return [Dropped(text(item["op"]), text(item["reason"]), integer(item["count"])) for item in items]


_TO_JSON: dict[type, Callable[[Any], dict[str, Json]]] = {
    Header: _header_to_json,
    Signature: _signature_to_json,
    Observed: _observed_to_json,
    Effects: _effects_to_json,
    Scope: _scope_to_json,
    Context: _context_to_json,
    Values: _values_to_json,
    Thread: _thread_to_json,
    Calls: calls_to_json,
    DeviceTimes: device_times_to_json,
    Kernels: kernels_to_json,
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
    "calls": calls_from_json,
    "device_times": device_times_from_json,
    "kernels": kernels_from_json,
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
    "observed": {"type", "signature", "values", "outputs", "since_ns", "storage"},
    "effects": {"type", "signature", "operators", "operator_ns", "after", "random_state"},
    "thread": {"type", "id", "name", "process"},
    "calls": {
        *("type", "thread", "start_ns", "signature", "scope", "after_ns", "duration_ns", "tensors", "storages"),
        *("newest", "device_ns", "page_faults", "streams", "perturbed", "slow_memory"),
    },
    "device_times": {"type", "thread", "first", "device_ns"},
    "kernels": {"type", "signature", "names", "launches", "device_ns"},
    "entered": {"type", "thread", "start_ns", "scope", "signature", "opened"},
    "end": {"type", "calls", "signatures", "duration_ns", "dropped", "passed_by", "without_values", "stopped"}
    | {"devices", "accelerator", "before", "thinned", "contended", "step_starts_ns"},
}
