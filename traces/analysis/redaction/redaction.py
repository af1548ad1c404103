"""Redaction of a trace record by record, in a finished file or during a capture."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from functools import cache
from math import copysign, isfinite, prod
from pathlib import Path
from signal import Signals
from types import EllipsisType
from typing import Any, NamedTuple, TypeVar, get_args

import torch

from opgrip.errors import UserError
from opgrip.traces.analysis.redaction.names import (
    DEVICE,
    NAME_RULES,
    NOT_RECORDED,
    OWN,
    REGION,
    RUNS,
    NameHasher,
    is_public_operator,
    is_public_text,
    public_version,
)
from opgrip.traces.analysis.redaction.policy import ASKED, LABELS, MODEL, SCALARS, VALUES, Policy, RedactionReport
from opgrip.traces.codec.call_blocks import CallBlock
from opgrip.traces.io.foreign_files import formats
from opgrip.traces.io.reader import TraceReader
from opgrip.traces.io.tensor_file import HEADER_FIELD
from opgrip.traces.io.writer import TraceWriter
from opgrip.traces.schema.arguments import Opaque, TensorSpec, tensors
from opgrip.traces.schema.json_values import LATEST_NS
from opgrip.traces.schema.operator_arguments import schema_arguments
from opgrip.traces.schema.privacy import DEVICE_KEY, HEADER_FIELDS, PUBLIC, Privacy, Table, privacy_of
from opgrip.traces.schema.python_objects import ScalarSpec
from opgrip.traces.schema.records import (
    FUNCTION,
    HIGHER_ORDER,
    OPERATOR,
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
    Values,
)
from opgrip.traces.schema.tensor_specs import map_values, plain_name
from opgrip.traces.table.profiler_labels import ENTER, EXIT
from opgrip.traces.values.exact import Exact

Number = TypeVar("Number", int, float)
# types in operator schemas whose arguments are values; arguments of type `int` are sizes, dimensions and flags
VALUE_TYPES = ("number", "float", "complex", "Scalar")
LARGEST_FLAG = 255  # largest size, dimension or flag that stays unchanged regardless of the shapes of the call
LARGEST_VALUE = 2  # largest integer value that stays unchanged; it replaces larger ones
DEFAULT_FLOAT = 0.5  # a valid probability, scale and exponent
SEEDS = ("seed", "philox_seed", "offset", "philox_offset")
# argument names of the lower and upper bound of random integers; the lower bound must stay below the upper one
LOWS, HIGHS = ("low", "from"), ("high", "to")
SHAPING_FLOATS = ("scale_factors",)  # arguments whose floats decide the size of an output


@dataclass(frozen=True, slots=True)
class Position:
    field: str
    op: str = ""
    argument: str = ""
    is_value: bool = False
    largest: int = LARGEST_FLAG


@cache
def fields_to_redact(cls: Any) -> list[tuple[str, Privacy | None, Any]]:
    privacies = privacy_of(cls)
    work: list[tuple[str, Privacy | None, Any]] = []
    for item in fields(cls):
        privacy = privacies[item.name]
        if privacy is None or privacy.treatment == "dropped":
            default = item.default if item.default_factory is MISSING else item.default_factory()
            work.append((item.name, None, default))
        elif privacy != PUBLIC:
            work.append((item.name, privacy, None))
    return work


class Redactor:
    def __init__(self, policy: Policy, names: NameHasher, report: RedactionReport | None) -> None:
        self._keeps_scalars, self._keeps_values = policy.keeps(SCALARS), policy.keeps(VALUES)
        self._keeps_labels = policy.keeps(LABELS)
        self._policy, self._names, self._report = policy, names, report
        self._tables = TableRedactor(policy, names, report)

    def signature(self, signature: Signature, record: str) -> Signature:
        op = signature.op
        ranges = {} if self._keeps_scalars else range_images(signature)
        largest = max(LARGEST_FLAG, _extent((signature.args, signature.kwargs, signature.outputs)))

        def argument(place: int | str, tree: Any) -> Any:
            name, kind = argument_name(op, place)
            # an integer of an extension's function or an unknown operator may be a size
            is_value = signature.kind == FUNCTION or any(name in kind for name in VALUE_TYPES)
            field = f"{record}.{'args' if isinstance(place, int) else 'kwargs'}"
            at = Position(field, op, name, is_value, largest)
            return self._number(at, ranges[place]) if place in ranges else self.tree(tree, at)

        redacted: Signature = self.fields(
            signature,
            Position(record),
            op=self.operator(f"{record}.op", op, signature.kind),
            args=tuple(argument(place, tree) for place, tree in enumerate(signature.args)),
            kwargs={
                self._keyword(signature, f"{record}.kwargs", name): argument(name, tree)
                for name, tree in signature.kwargs.items()
            },
            outputs=self.outputs(op, record, signature.outputs),
        )
        return redacted

    def outputs(self, op: str, record: str, outputs: Any) -> Any:
        # numbers in results are values: a replay does not need them
        return self.tree(outputs, Position(f"{record}.outputs", op, "outputs", is_value=True))

    def operator(self, field: str, op: str, kind: str = "") -> str:
        image = self._names.operator(op, kind)
        self.note(field, "operator", op, image, self._names.reason_of_operator(image))
        return image

    def fields(self, value: Any, at: Position, **replacements: Any) -> Any:
        redacted = dict(replacements)
        cls: Any = type(value)
        for name, privacy, default in fields_to_redact(cls):
            if name in replacements:
                continue
            field, image = getattr(value, name), default
            if privacy is not None:
                inner = at if "." in at.field else Position(f"{at.field}.{name}")
                image = self._field(name, privacy, field, inner)
            if image is not field:
                redacted[name] = image
        return replace(value, **redacted) if redacted else value

    def _field(self, name: str, privacy: Privacy, value: Any, at: Position) -> Any:
        if privacy.table is not None:
            return self._tables.table(value, privacy.table, at.field if at.field != "header.fields" else "header")
        if value is None:
            return None
        if privacy.treatment == "nested":
            if privacy.kind == "attributes":
                return {self._names.function(key): self.tree(item, at) for key, item in value.items()}
            return self.tree(value, at)
        if privacy.treatment == "replaced":
            if privacy.kind == "seed":
                return 0
            return tuple(map(default_number, value)) if isinstance(value, tuple) else default_number(value)
        return self.word(privacy.kind, name, value, at)

    def word(self, kind: str, label: str, value: Any, at: Position) -> Any:
        if value is None:
            return None
        if isinstance(value, tuple | list):
            return type(value)(self.word(kind, label, item, at) for item in value)
        rule = NAME_RULES[kind]
        image = rule.redact(self._names, value)
        if self._report is None:
            return image
        why = ASKED if self._policy.keeps(rule.kept_by) else rule.why
        self.note(at.field, rule.label or label, plain_name(value), plain_name(image), why)
        return image

    def note(self, field: str, label: str, text: str, image: str, why: str) -> None:
        if self._report is not None:
            self._report.add_text(field, label, text, image, why)

    def tree(self, value: Any, at: Position) -> Any:
        cls = type(value)
        if value is None or isinstance(value, bool | torch.Size | EllipsisType):
            return value
        if cls in (torch.dtype, torch.layout, torch.memory_format, torch.device):
            return self.word(cls.__name__, cls.__name__, value, at)
        match value:
            case int():
                return self._integer(value, at)
            case float():
                return self._floating(value, at)
            case complex():
                return complex(self._floating(value.real, at), self._floating(value.imag, at))
            case str():
                return self._text(value, at)
            case bytes():
                return bytes(len(value))
            case range():
                start, stop, step = (self._integer(part, at) for part in (value.start, value.stop, value.step))
                return range(start, stop, step or 1)
            case slice(start=start, stop=stop, step=step):
                return slice(*(None if part is None else self._integer(part, at) for part in (start, stop, step)))
            case list():
                return [self.tree(item, at) for item in value]
            case tuple():
                return tuple(self.tree(item, at) for item in value)
            case set() | frozenset():
                return cls(self.tree(item, at) for item in value)
            case dict():
                return self._items(value, at)
            case ScalarSpec():
                return self.fields(value, replace(at, is_value=True))
            case TensorSpec():
                spec = self.fields(value, at)
                return spec if self._keeps_values else map_values(lambda number: None, spec)
        # a type that a later version adds is left out
        return self.fields(value, at) if is_dataclass(cls) else Opaque(NOT_RECORDED)

    def _integer(self, value: int, at: Position) -> int:
        image = value if self._keeps_scalars else self._image_of_integer(value, at)
        return self._number(at, image)

    def _image_of_integer(self, value: int, at: Position) -> int:
        if at.argument in SEEDS:
            return 0
        if at.is_value:
            return default_integer(value)
        if abs(value) <= at.largest:
            return value
        # a limit such as the end of a slice must stay larger than every size; of random integers, the lower bound must
        # stay below the upper one
        is_inner = at.argument in (LOWS if value > 0 else HIGHS)
        size = at.largest if is_inner else at.largest + 1
        return size if value > 0 else -size

    def _floating(self, value: float, at: Position) -> float:
        # an argument of this name decides a shape only if it is in an operator's schema
        shapes = at.argument in SHAPING_FLOATS and bool(schema_arguments(at.op))
        image = value if self._keeps_scalars or shapes else default_float(value)
        return self._number(at, image)

    def _number(self, at: Position, image: Number) -> Number:
        if self._report is not None and at.field in ("signature.args", "signature.kwargs"):
            why = "a size, dimension, index or flag" if type(image) is int else "the default that replaces a float"
            self._report.add_number(at.field, self._names.operator(at.op), image, ASKED if self._keeps_scalars else why)
        return image

    def _text(self, value: str, at: Position) -> str:
        why = "a setting, device or type that torch knows"
        if at.op.startswith((ENTER, EXIT)):
            image, is_requested = self._names.label(value), self._keeps_labels
        elif self._keeps_scalars:
            image, is_requested = value, True
        else:
            image = self._names.equation(value) if at.op.startswith("aten.einsum") else self._names.text(value)
            is_requested = False
        self.note(at.field, "string", value, image, ASKED if is_requested else why)
        return image

    def _keyword(self, signature: Signature, field: str, name: str) -> str:
        is_own = signature.kind == FUNCTION and not signature.op.startswith(HIGHER_ORDER)
        parameters = dict(schema_arguments(signature.op))
        is_unknown = bool(parameters) and name not in parameters
        hides = is_own or is_unknown or self._names.hides(signature.op)
        image = self._names.word(name) if hides else name
        self.note(field, "name of an argument", name, image, "argument of an operator that keeps its name")
        return image

    def _items(self, items: Mapping[Any, Any], at: Position) -> dict[Any, Any]:
        redacted: dict[Any, Any] = {}
        for key, item in items.items():
            image = self._names.word(key) if isinstance(key, str) else self.tree(key, at)
            # two different numbers can have the same default
            redacted[self._names.word(repr(key)) if image in redacted else image] = self.tree(item, at)
        return redacted


def default_integer(value: int) -> int:
    return max(-LARGEST_VALUE, min(LARGEST_VALUE, value))


def default_float(value: float) -> float:
    return copysign(DEFAULT_FLOAT, value) if isfinite(value) and abs(value) not in (0.0, 1.0) else value


def default_number(value: int | float) -> int | float:
    if isinstance(value, bool):
        return value
    return default_integer(value) if isinstance(value, int) else default_float(value)


def _extent(tree: Any) -> int:
    # elements of the largest tensor, or from the start of a storage to a tensor's end
    parts = (part for spec in tensors(tree) for part in (spec, *spec.parts))
    return max((max(prod(part.shape), part.extent // max(1, part.dtype.itemsize)) for part in parts), default=0)


def argument_name(op: str, place: int | str) -> tuple[str, str]:
    parameters = schema_arguments(op)
    if isinstance(place, int):
        return parameters[place] if place < len(parameters) else (str(place), "")
    return place, dict(parameters).get(place, "")


def range_images(signature: Signature) -> dict[int | str, int | float]:
    places: list[tuple[int | str, Any]] = [*enumerate(signature.args), *signature.kwargs.items()]
    numbers = {argument_name(signature.op, place)[0]: (place, value) for place, value in places}
    output, (_, step) = signature.outputs, numbers.get("step", (None, 1))
    is_range = signature.kind == OPERATOR and signature.op.startswith(("aten.arange.", "aten.range."))
    if not is_range or not isinstance(output, TensorSpec) or len(output.shape) != 1 or not _is_number(step):
        return {}
    step = type(step)(copysign(1, step))
    # `range` includes its end
    count = output.shape[0] - signature.op.startswith("aten.range.")
    images = {"start": 0, "end": step * count, "step": step}
    # a float stays a float, because it decides the dtype
    return {
        place: float(images[name]) if isinstance(value, float) else images[name]
        for name, (place, value) in numbers.items()
        if name in images and _is_number(value)
    }


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# words that occur in torch's settings, in addition to types, devices and settings of operators
SETTING_WORDS = frozenset(
    (
        "backends",
        "cuda",
        "cudnn",
        "mkldnn",
        "matmul",
        "conv",
        "rnn",
        "all",
        "generic",
        "none",
        "default",
        "true",
        "false",
    )
    + ("cudaMallocAsync", "flash", "mem_efficient", "efficient", "math", "overrideable", "expandable_segments")
)
HARDWARE = re.compile(r"[\w .,()@+/:-]{1,120}")
PLATFORM = re.compile(r"(Linux|Darwin|Windows)( (x86_64|AMD64|aarch64|arm64|ppc64le|s390x|riscv64)$)?")
CLOCKS = ("collectives", "starts")
_LEFT_OUT = object()


class TableRedactor(NamedTuple):
    policy: Policy
    names: NameHasher
    report: RedactionReport | None

    def table(self, value: object, table: Table, field: str) -> dict[str, Any]:
        redacted: dict[str, Any] = {}
        for name, item in value.items() if isinstance(value, dict) else ():
            is_device = DEVICE_KEY in table and DEVICE.fullmatch(str(name)) is not None
            entry = table.get(DEVICE_KEY if is_device else name)
            own = f"header.{name}" if field == "header" else field
            image = _LEFT_OUT if entry is None else self._entry(entry, item, own)
            if image is _LEFT_OUT:
                continue
            redacted[name] = image
            if is_device:
                self._note(own, "header", name, name)
        return redacted

    def _entry(self, entry: Any, value: Any, field: str) -> Any:
        match entry:
            case list() if isinstance(value, list):
                return [self.table(item, entry[0], field) for item in value]
            case Mapping():
                return self.table(value, entry, field) or _LEFT_OUT
            case Privacy("nested") if isinstance(value, list):
                return [self.table(item, HEADER_FIELDS, "header") for item in value]
            case Privacy("public", ""):
                return value
            case Privacy("public" | "hashed" | "replaced", kind):
                image = _RULES[kind](self, value)
                for text in _texts(image):
                    self._note(field, kind, text, text if image == value else f"{text}*")
                return image
        return _LEFT_OUT

    def _note(self, field: str, kind: str, text: str, image: str) -> None:
        if self.report is not None:
            label, why = _REASONS.get(kind, ("header", "versions, hardware and settings determine times"))
            if field == "context.settings":
                label, why = "setting", "torch's settings determine times"
            is_requested = kind == "model" and self.policy.keeps(MODEL)
            self.report.add_text(field, label, text, image, ASKED if is_requested else why)

    def model(self, value: Any) -> Any:
        if self.policy.keeps(MODEL):
            return value if isinstance(value, str) else _LEFT_OUT
        return self.names.word(str(value))

    def stop_reason(self, value: Any) -> Any:
        if not isinstance(value, str):
            return _LEFT_OUT
        return value if value in Signals.__members__ else self.names.error(value)


def _texts(image: Any) -> list[str]:
    if isinstance(image, dict):
        return [text for pair in image.items() for item in pair for text in _texts(item)]
    if isinstance(image, list):
        return [text for item in image for text in _texts(item)]
    return [image] if isinstance(image, str) else []


def _is_setting(value: object) -> bool:
    if isinstance(value, list):
        return all(map(_is_setting, value))
    if isinstance(value, dict):
        return all(map(_is_setting, (*value, *value.values())))
    if not isinstance(value, str):
        return isinstance(value, bool | int | float)
    return all(word in SETTING_WORDS or is_public_text(word) for word in re.split(r"[,:=. ]", value))


def _is_hardware(value: object) -> bool:
    return isinstance(value, bool | int | float) or (isinstance(value, str) and HARDWARE.fullmatch(value) is not None)


def _if(condition: Callable[[Any], bool]) -> Callable[[TableRedactor, Any], Any]:
    return lambda redactor, value: value if condition(value) else _LEFT_OUT


def _platform(redactor: TableRedactor, value: Any) -> Any:
    match = PLATFORM.match(str(value))
    return match[0] if match else _LEFT_OUT


_RULES: dict[str, Callable[[TableRedactor, Any], Any]] = {
    "count": _if(lambda value: type(value) is int and 0 <= value < 1 << 31),
    "integer": _if(lambda value: value is None or type(value) is int),
    "number": _if(lambda value: isinstance(value, bool | int)),
    "flag": _if(lambda value: isinstance(value, bool)),
    "device": _if(lambda value: DEVICE.fullmatch(str(value)) is not None),
    "hardware": _if(_is_hardware),
    "setting": _if(_is_setting),
    "run": _if(lambda value: value in RUNS),
    "format": _if(lambda value: value in formats.names()),
    "version": lambda redactor, value: public_version(str(value)) or _LEFT_OUT,
    "platform": _platform,
    "start": lambda redactor, value: (
        (value + redactor.names.shift_ns()) % LATEST_NS if type(value) is int else _LEFT_OUT
    ),
    "clocks": lambda redactor, value: redactor.names.known(value, CLOCKS) if isinstance(value, str) else _LEFT_OUT,
    "model": TableRedactor.model,
    "stop reason": TableRedactor.stop_reason,
}
_REASONS = {"device": ("device", "devices determine times"), "run": ("run", OWN), "model": ("name", OWN)}


# names of record types in the file
RECORD_NAMES: dict[type, str] = {cls: re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower() for cls in get_args(Record)}
REDACTED = "redacted"  # header field that marks a redacted trace and lists what was kept
# pattern of kernel names that compilers generate, which contain no path and no text
KERNEL = re.compile(r"[\w<>:,&*\[\]() =.~#{}-]{1,4096}")


class Redaction:
    def __init__(self, policy: Policy, report: RedactionReport | None = None) -> None:
        self.policy = policy
        self.names = NameHasher(policy)
        self._report = report
        self._redactor = Redactor(policy, self.names, report)
        self._called: dict[int, tuple[str, str]] = {}  # operator and kind of each signature
        self._kinds: dict[str, str] = {}  # kind of each operator

    @property
    def custom_operators(self) -> list[str]:
        operators = (op for op, kind in self._kinds.items() if kind != FUNCTION and not op.startswith(REGION))
        return [op for op in operators if not is_public_operator(op) and not self.names.hides(op)]

    def records(self, record: Record) -> list[Record]:
        name = RECORD_NAMES.get(type(record))
        if name is None:
            return []
        # fields of some records depend on each other or on earlier records
        redact: Callable[[Any], Record | None] = getattr(self, f"_{name}", self._plain)
        redacted = redact(record)
        return [] if redacted is None else [redacted]

    def _plain(self, record: Any, **replacements: Any) -> Any:
        return self._redactor.fields(record, Position(RECORD_NAMES[type(record)]), **replacements)

    def _header(self, record: Header) -> Header:
        marks = {"kept": sorted(self.policy.keep), "operators_hidden": self.policy.hide_operators}
        return Header({**self._redactor.fields(record, Position("header")).fields, REDACTED: marks})

    def _signature(self, record: Signature) -> Signature:
        self._called[record.number] = record.op, record.kind
        self._kinds[record.op] = record.kind
        return self._redactor.signature(record, "signature")

    def _observed(self, record: Observed) -> Any:
        op, _ = self._called.get(record.signature, ("", ""))
        values = record.values if self.policy.keeps(VALUES) else [None] * len(record.values)
        return self._plain(record, values=values, outputs=self._redactor.outputs(op, "observed", record.outputs))

    def _effects(self, record: Effects) -> Any:
        after = None
        if record.after is not None:
            redacted = self._redactor.signature(
                Signature(record.signature, FUNCTION, "", *record.after), "effects.after"
            )
            after = (redacted.args, redacted.kwargs)
        return self._plain(record, after=after)

    def _scope(self, record: Scope) -> Any:
        inside = record.inside
        if inside is not None:
            inside = self._redactor.operator("scope.inside", inside, FUNCTION if record.gripped else "")
        return self._plain(record, inside=inside, line=self.names.line(record.file, record.line))

    def _values(self, record: Values) -> Any:
        if not self.policy.keeps(VALUES):
            return None
        if self._report is not None and isinstance(record.model, Exact):
            self._report.add_values(record.model.data)
        return self._plain(record, number=record.number, model=record.model)

    def _kernels(self, record: Kernels) -> Any:
        op, kind = self._called.get(record.signature, ("", FUNCTION))
        hidden = kind == FUNCTION or self.names.hides(op)
        names = [name if KERNEL.fullmatch(name) and not hidden else self.names.word(name) for name in record.names]
        for name, image in zip(record.names, names, strict=True):
            self._redactor.note("kernels.names", "kernel", name, image, "kernel of an operator that keeps its name")
        return self._plain(record, names=names)

    def _entered(self, record: Entered) -> Any:
        opened = record.opened
        return self._plain(record, opened=opened and self._redactor.signature(opened, "entered.opened"))

    def _end(self, record: End) -> Any:
        return self._plain(
            record,
            dropped=self._dropped(record.dropped, "end.dropped"),
            passed_by=self._dropped(record.passed_by, "end.passed_by"),
            without_values=self._dropped(record.without_values, "end.without_values"),
            without_work=self._dropped(record.without_work, "end.without_work"),
        )

    def _dropped(self, items: Iterable[Dropped], field_name: str) -> list[Dropped]:
        redacted = []
        for item in items:
            kind = self._kinds.get(item.op)
            op = self.names.unrecorded(item.op) if kind is None else self.names.operator(item.op, kind)
            self._redactor.note(field_name, "operator", item.op, op, self.names.reason_of_operator(op))
            redacted.append(self._redactor.fields(item, Position(field_name), op=op))
        return redacted


@dataclass(frozen=True, slots=True)
class RedactedFile:
    calls: int
    report: RedactionReport
    passed_over: dict[str, int]
    whole_values: tuple[str, ...]
    missing: str | None

    def as_json(self) -> dict[str, object]:
        others = {"passed_over": self.passed_over, "whole_values": list(self.whole_values)}
        return {**self.report.as_json(), **others}


def redact(
    path: str | Path, output: Path, policy: Policy, force: bool = False, partial: bool = False, unbounded: bool = False
) -> RedactedFile:
    reader = TraceReader(path, unbounded)
    report = RedactionReport()
    redaction = Redaction(policy, report)
    incoming = iter(reader.columns())
    header = next(incoming)
    assert isinstance(header, Header)
    (redacted,) = redaction.records(header)
    assert isinstance(redacted, Header)
    calls = 0
    with TraceWriter(output, redacted, force) as writer:
        for record in incoming:
            if isinstance(record, CallBlock):
                writer.write(record)
                calls += len(record)
                continue
            for item in redaction.records(record):
                writer.write(item)
        if reader.missing is not None and not partial:
            raise UserError(reader.missing, "redact it with --partial")
    return RedactedFile(calls, report, dict(reader.unknown), _whole_values(header), reader.missing)


def _whole_values(header: Header) -> tuple[str, ...]:
    processes = header.fields.get("processes")
    headers = [header.fields, *(item for item in processes or () if isinstance(item, dict))]
    return tuple(str(fields[HEADER_FIELD]) for fields in headers if fields.get(HEADER_FIELD) is not None)
