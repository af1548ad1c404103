"""The records of a trace, as Python values and as the JSON objects that stand in the file.

`to_json` and `from_json` are each other's inverse. `from_json` checks what it reads: whatever it returns has the
types that are declared here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeAlias

from opgrip.traces.arguments import FormatError, Json, Opaque, decode, encode
from opgrip.traces.values import ValueModel, value_model_from_json, value_model_to_json, value_models

FORMAT = "opgrip-trace"
MAJOR, MINOR = 1, 0

LIMIT = 1 << 63
"""Bound of the whole numbers in a trace."""

OPERATOR = "operator"
EXTENSION = "extension"


@dataclass(frozen=True, slots=True)
class Header:
    """The first record: what wrote the trace, of what, where and when."""

    fields: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Signature:
    """All that replaying a call needs.

    Attributes
    ----------
    number : what calls refer to it by
    kind : `operator` for the dispatcher's, `extension` for a function of an extension module
    op : `aten.addmm.default`, or `mmcv._ext:nms` for an extension's function
    args, kwargs : trees of values and `TensorSpec`
    outputs : what the first call returned, in the same form; `Opaque` where that is not known
    raised : the error that the first call ended in, in one line; None where it returned
    """

    number: int
    kind: str
    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: Any = Opaque("not recorded")  # noqa: RUF009 - frozen
    raised: str | None = None


@dataclass(frozen=True, slots=True)
class Scope:
    """Where calls came from.

    Attributes
    ----------
    module : path of the innermost running module from its root, which is itself the empty path
    module_type : name of that module's class; empty outside all modules
    phase : `forward`, `backward` or `optimizer`
    inside : the extension function that made the call, None where the program did
    """

    number: int
    module: str
    module_type: str
    phase: str
    inside: str | None = None


@dataclass(frozen=True, slots=True)
class Values:
    """A value model under the number that tensors refer to it by."""

    number: int
    model: ValueModel


@dataclass(frozen=True, slots=True)
class Thread:
    """A thread that made calls."""

    number: int
    name: str


@dataclass(frozen=True, slots=True)
class Calls:
    """Calls of one thread, in the order in which they ended.

    Attributes
    ----------
    signature, scope : numbers, one a call
    start_ns : since the start of the capture, one a call
    duration_ns : one a call
    """

    thread: int
    signature: list[int]
    scope: list[int]
    start_ns: list[int]
    duration_ns: list[int]


@dataclass(frozen=True, slots=True)
class Dropped:
    """What could not be recorded, by operator and reason."""

    op: str
    reason: str
    count: int


@dataclass(frozen=True, slots=True)
class End:
    """The last record: totals, and what was not recorded.

    Attributes
    ----------
    duration_ns : of the whole capture
    dropped : calls that are not in the trace
    without_values : tensors that are, without a value model
    """

    calls: int
    signatures: int
    duration_ns: int
    dropped: list[Dropped] = field(default_factory=list)
    without_values: list[Dropped] = field(default_factory=list)


Record: TypeAlias = Header | Signature | Scope | Values | Thread | Calls | End


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
    known = _FIELDS.get(form["type"])
    return [] if known is None else [name for name in form if name not in known]


def _header_to_json(record: Header) -> dict[str, Json]:
    return {"type": "header", "format": FORMAT, "version": f"{MAJOR}.{MINOR}", **record.fields}


def _header_from_json(form: Mapping[str, Json]) -> Header:
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
    if kind not in (OPERATOR, EXTENSION):
        raise FormatError(f"a signature of unknown kind {kind[:60]!r}")
    kwargs = form.get("kwargs", {})
    if not isinstance(kwargs, dict) or not isinstance(form["args"], list):
        raise FormatError("a signature whose arguments are not a list and an object")
    raised = form.get("raised")
    return Signature(
        number=_integer(form["id"]),
        kind=kind,
        op=_text(form["op"]),
        args=tuple(decode(item) for item in form["args"]),
        kwargs={_text(name): decode(item) for name, item in kwargs.items()},
        outputs=decode(form["outputs"]) if "outputs" in form else Opaque("not recorded"),
        raised=None if raised is None else _text(raised),
    )


def _scope_to_json(record: Scope) -> dict[str, Json]:
    form: dict[str, Json] = {"type": "scope", "id": record.number, "module": record.module}
    form |= {"module_type": record.module_type, "phase": record.phase}
    if record.inside is not None:
        form["inside"] = record.inside
    return form


def _scope_from_json(form: Mapping[str, Json]) -> Scope:
    inside = form.get("inside")
    return Scope(
        number=_integer(form["id"]),
        module=_text(form["module"]),
        module_type=_text(form["module_type"]),
        phase=_text(form["phase"]),
        inside=None if inside is None else _text(inside),
    )


def _values_to_json(record: Values) -> dict[str, Json]:
    return {"type": "values", "id": record.number, **value_model_to_json(record.model)}


def _values_from_json(form: Mapping[str, Json]) -> Values:
    return Values(_integer(form["id"]), value_model_from_json(form))


def _thread_to_json(record: Thread) -> dict[str, Json]:
    return {"type": "thread", "id": record.number, "name": record.name}


def _thread_from_json(form: Mapping[str, Json]) -> Thread:
    return Thread(_integer(form["id"]), _text(form["name"]))


def _calls_to_json(record: Calls) -> dict[str, Json]:
    starts = record.start_ns
    after = [later - earlier for earlier, later in pairwise(starts)]
    return {
        "type": "calls",
        "thread": record.thread,
        "start_ns": starts[0] if starts else 0,
        "signature": record.signature,
        "scope": record.scope,
        "after_ns": [0, *after] if starts else [],
        "duration_ns": record.duration_ns,
    }


def _calls_from_json(form: Mapping[str, Json]) -> Calls:
    columns = [_integers(form[name]) for name in ("signature", "scope", "after_ns", "duration_ns")]
    if len({len(column) for column in columns}) != 1:
        raise FormatError("a block of calls whose columns differ in length")
    start = _integer(form["start_ns"])
    starts = _integers([start := start + after for after in columns[2]])
    return Calls(_integer(form["thread"]), columns[0], columns[1], starts, columns[3])


def _end_to_json(record: End) -> dict[str, Json]:
    form: dict[str, Json] = {"type": "end", "calls": record.calls, "signatures": record.signatures}
    form |= {"duration_ns": record.duration_ns, "dropped": _dropped_to_json(record.dropped)}
    return form | {"without_values": _dropped_to_json(record.without_values)}


def _dropped_to_json(dropped: list[Dropped]) -> list[dict[str, Json]]:
    return [{"op": item.op, "reason": item.reason, "count": item.count} for item in dropped]


def _end_from_json(form: Mapping[str, Json]) -> End:
    return End(
        calls=_integer(form["calls"]),
        signatures=_integer(form["signatures"]),
        duration_ns=_integer(form["duration_ns"]),
        dropped=_dropped_from_json(form["dropped"]),
        without_values=_dropped_from_json(form.get("without_values", [])),
    )


def _dropped_from_json(items: list[Mapping[str, Json]]) -> list[Dropped]:
    return [Dropped(_text(item["op"]), _text(item["reason"]), _integer(item["count"])) for item in items]


def _integer(value: Json) -> int:
    if type(value) is not int or not -LIMIT <= value < LIMIT:
        raise FormatError(f"{str(value)[:60]!r} stands where a whole number of 64 bits should")
    return value


def _integers(value: Json) -> list[int]:
    if not isinstance(value, list):
        raise FormatError(f"{str(value)[:60]!r} stands where a list of whole numbers should")
    return [_integer(item) for item in value]


def _text(value: Json) -> str:
    if not isinstance(value, str):
        raise FormatError(f"{str(value)[:60]!r} stands where text should")
    return value


_TO_JSON: dict[type, Callable[[Any], dict[str, Json]]] = {
    Header: _header_to_json,
    Signature: _signature_to_json,
    Scope: _scope_to_json,
    Values: _values_to_json,
    Thread: _thread_to_json,
    Calls: _calls_to_json,
    End: _end_to_json,
}

_FROM_JSON: dict[str, Callable[[Mapping[str, Json]], Record]] = {
    "header": _header_from_json,
    "signature": _signature_from_json,
    "scope": _scope_from_json,
    "values": _values_from_json,
    "thread": _thread_from_json,
    "calls": _calls_from_json,
    "end": _end_from_json,
}

_FIELDS: dict[str, set[str]] = {
    "signature": {"type", "id", "kind", "op", "args", "kwargs", "outputs", "raised"},
    "scope": {"type", "id", "module", "module_type", "phase", "inside"},
    "thread": {"type", "id", "name"},
    "calls": {"type", "thread", "start_ns", "signature", "scope", "after_ns", "duration_ns"},
    "end": {"type", "calls", "signatures", "duration_ns", "dropped", "without_values"},
}
