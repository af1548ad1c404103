"""Redaction of dictionaries in a trace's header by the tables that declare their fields."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from signal import Signals
from typing import Any, NamedTuple

from opgrip.traces.analysis.redaction.names import DEVICE, OWN, RUNS, NameHasher, is_public_text, public_version
from opgrip.traces.analysis.redaction.policy import ASKED, MODEL, Policy, RedactionReport
from opgrip.traces.io.foreign_files import formats
from opgrip.traces.schema.json_values import LATEST_NS
from opgrip.traces.schema.privacy import DEVICE_KEY, HEADER_FIELDS, Privacy, Table

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
        """Return a dictionary with its declared entries redacted; an entry of which nothing may stay is left out.

        field : name of the record's field in the report; with `header`, a key is reported as `header.KEY`
        """
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
        """Return the redacted signal or error because of which a flight recorder wrote its file."""
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
_REASONS = {
    "device": ("device", "devices determine times"),
    "run": ("run", OWN),
    "model": ("name", OWN),
}
