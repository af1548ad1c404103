"""The records of a trace, as Python values and as the JSON objects that stand in the file.

`to_json` and `from_json` are each other's inverse. `from_json` checks what it reads: whatever it returns has the
types that are declared here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeAlias, TypeVar

from opgrip.traces.arguments import FormatError, Json, Opaque, decode, encode
from opgrip.traces.values import ValueModel, value_model_from_json, value_model_to_json, value_models

FORMAT = "opgrip-trace"
MAJOR, MINOR = 1, 1

LIMIT = 1 << 63
"""Bound of the whole numbers in a trace."""

OPERATOR = "operator"
EXTENSION = "extension"
COMPILED = "compiled"
KINDS = (OPERATOR, EXTENSION, COMPILED)

NO_STORAGE = -1
"""Number of the storage of a tensor that has none of its own."""


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
    kind : `operator` for the dispatcher's, `extension` for a function of an extension module, `compiled` for a region
        that torch.compile made
    op : `aten.addmm.default`; `mmcv._ext:nms` for an extension's function
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
    inside : the extension function, gripped function or compiled region that made the call, None where the program did
    function, file, line : the innermost frame of the program, torch's own passed over; empty where there is none
    callers : the frames around it, from the inside, each as `file:line function`
    context : number of the settings that the calls ran under
    forward : number of the scope of the forward calls that caused these calls of a backward pass
    """

    number: int
    module: str
    module_type: str
    phase: str
    inside: str | None = None
    function: str = ""
    file: str = ""
    line: int = 0
    callers: tuple[str, ...] = ()
    context: int | None = None
    forward: int | None = None


@dataclass(frozen=True, slots=True)
class Context:
    """Settings that change how operators run: gradient and inference mode, autocast, threads and the like."""

    number: int
    settings: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Values:
    """A value model under the number that tensors refer to it by."""

    number: int
    model: ValueModel


@dataclass(frozen=True, slots=True)
class Thread:
    """A thread that made calls.

    Attributes
    ----------
    process : number of its process, in a trace that was merged from those of several; None in others
    """

    number: int
    name: str
    process: int | None = None


@dataclass(frozen=True, slots=True)
class Calls:
    """Calls of one thread, in the order in which they ended.

    Attributes
    ----------
    signature, scope : numbers, one a call
    start_ns : since the start of the capture, one a call
    duration_ns : one a call
    tensors : how many tensors a call took and gave, one a call
    storages : the memory that these tensors live in, `sum(tensors)` numbers: of each call those of its arguments, in
        their order, then those of its results. A number stands for the same memory in the whole trace.
    newest : the largest number of a storage in the blocks before; numbers are written by their distance to it
    device_ns : how long each call kept an accelerator busy, -1 for one that ran on the host alone; empty where none did
    """

    thread: int
    signature: list[int]
    scope: list[int]
    start_ns: list[int]
    duration_ns: list[int]
    tensors: list[int] = field(default_factory=list)
    storages: list[int] = field(default_factory=list)
    newest: int = -1
    device_ns: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Entered:
    """A call that had not ended when this was written. If it did end, the trace also has it among its calls.

    Attributes
    ----------
    start_ns : since the start of the capture
    signature : number of its signature, which the trace holds where a call of it has ended before
    opened : what was known of the signature, where none had
    """

    thread: int
    start_ns: int
    scope: int
    signature: int
    opened: Signature | None = None


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
    passed_by : calls that are in the trace as those that they were made of
    stopped : the limit that ended the recording while the program went on; None where none did
    without_values : tensors that are, without a value model
    """

    calls: int
    signatures: int
    duration_ns: int
    dropped: list[Dropped] = field(default_factory=list)
    passed_by: list[Dropped] = field(default_factory=list)
    without_values: list[Dropped] = field(default_factory=list)
    stopped: str | None = None


T = TypeVar("T")

Record: TypeAlias = Header | Signature | Scope | Context | Values | Thread | Calls | Entered | End


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
    )


def _context_to_json(record: Context) -> dict[str, Json]:
    return {"type": "context", "id": record.number, "settings": record.settings}


def _context_from_json(form: Mapping[str, Json]) -> Context:
    settings = form["settings"]
    if not isinstance(settings, dict) or any(isinstance(value, dict | list) for value in settings.values()):
        raise FormatError("a context whose settings are not an object of plain values")
    return Context(_integer(form["id"]), settings)


def _values_to_json(record: Values) -> dict[str, Json]:
    return {"type": "values", "id": record.number, **value_model_to_json(record.model)}


def _values_from_json(form: Mapping[str, Json]) -> Values:
    return Values(_integer(form["id"]), value_model_from_json(form))


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
    return form | {"device_ns": record.device_ns} if record.device_ns else form


def _calls_from_json(form: Mapping[str, Json]) -> Calls:
    columns = [_integers(form[name]) for name in ("signature", "scope", "after_ns", "duration_ns")]
    if len({len(column) for column in columns}) != 1:
        raise FormatError("a block of calls whose columns differ in length")
    start = _integer(form["start_ns"])
    starts = _integers([start := start + after for after in columns[2]])
    tensors, newest = _integers(form.get("tensors", [])), _integer(form.get("newest", -1))
    storages = decode_storages(_integers(form.get("storages", [])), newest)
    if tensors and (len(tensors) != len(starts) or min(tensors) < 0 or sum(tensors) != len(storages)):
        raise FormatError("a block of calls whose storages are not those of its calls")
    device_ns = _integers(form.get("device_ns", []))
    if device_ns and len(device_ns) != len(starts):
        raise FormatError("a block of calls whose columns differ in length")
    return Calls(
        *(_integer(form["thread"]), columns[0], columns[1], starts, columns[3]),
        *(tensors, storages, newest, device_ns),
    )


FAR = 999
"""Storages that are older than so many are written by their number."""


def encode_storages(numbers: list[int], newest: int) -> list[int]:
    """Numbers of storages as a block holds them, so that a loop's rounds read the same.

    A positive code is that much more than the largest number so far; 0 to `1 - FAR` is that much less than it; `-FAR`
    is `NO_STORAGE`; a lower code c is the number `-FAR - 1 - c`.
    """
    codes = []
    for number in numbers:
        if number > newest:
            codes.append(number - newest)
            newest = number
        elif number == NO_STORAGE:
            codes.append(-FAR)
        else:
            distance = newest - number
            codes.append(-distance if distance < FAR else -FAR - 1 - number)
    return codes


def decode_storages(codes: list[int], newest: int) -> list[int]:
    """The numbers that `encode_storages` was given."""
    numbers = []
    for code in codes:
        if code > 0:
            newest += code
            numbers.append(newest)
        elif code > -FAR:
            numbers.append(newest + code)
        else:
            numbers.append(NO_STORAGE if code == -FAR else -FAR - 1 - code)
    return _integers(numbers)


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


def _optional(read: Callable[[Any], T], value: Json) -> T | None:
    return None if value is None else read(value)


_TO_JSON: dict[type, Callable[[Any], dict[str, Json]]] = {
    Header: _header_to_json,
    Signature: _signature_to_json,
    Scope: _scope_to_json,
    Context: _context_to_json,
    Values: _values_to_json,
    Thread: _thread_to_json,
    Calls: _calls_to_json,
    Entered: _entered_to_json,
    End: _end_to_json,
}

_FROM_JSON: dict[str, Callable[[Mapping[str, Json]], Record]] = {
    "header": _header_from_json,
    "signature": _signature_from_json,
    "scope": _scope_from_json,
    "context": _context_from_json,
    "values": _values_from_json,
    "thread": _thread_from_json,
    "calls": _calls_from_json,
    "entered": _entered_from_json,
    "end": _end_from_json,
}

_FIELDS: dict[str, set[str]] = {
    "signature": {"type", "id", "kind", "op", "args", "kwargs", "outputs", "raised"},
    "scope": {
        *("type", "id", "module", "module_type", "phase", "inside", "function", "file", "line", "callers", "context"),
        "forward",
    },
    "context": {"type", "id", "settings"},
    "thread": {"type", "id", "name", "process"},
    "calls": {
        *("type", "thread", "start_ns", "signature", "scope", "after_ns", "duration_ns", "tensors", "storages"),
        *("newest", "device_ns"),
    },
    "entered": {"type", "thread", "start_ns", "scope", "signature", "opened"},
    "end": {"type", "calls", "signatures", "duration_ns", "dropped", "passed_by", "without_values", "stopped"},
}
