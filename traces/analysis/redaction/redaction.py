"""Redaction of a trace record by record, in a finished file or during a capture.

Each field is redacted as its type declares (`traces/schema/privacy.py`). This module adds the cases that a declaration
cannot express: names that depend on other fields, and value models, which depend on the call that takes them.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from opgrip.errors import UserError
from opgrip.traces.analysis.redaction.arguments import Position, Redactor, argument_name
from opgrip.traces.analysis.redaction.coarse_models import (
    CallFacts,
    RedactedModel,
    TensorSlot,
    call_facts,
    facts_of,
    redact_model,
    slots_of,
)
from opgrip.traces.analysis.redaction.names import REGION, NameHasher, is_public_operator
from opgrip.traces.analysis.redaction.policy import VALUES, Policy, RedactionReport
from opgrip.traces.codec.call_blocks import CallBlock
from opgrip.traces.io.reader import TraceReader
from opgrip.traces.io.tensor_file import HEADER_FIELD
from opgrip.traces.io.writer import TraceWriter
from opgrip.traces.schema.accelerator_records import Kernels
from opgrip.traces.schema.arguments import Opaque, TensorSpec, map_leaves
from opgrip.traces.schema.records import (
    FUNCTION,
    Dropped,
    Effects,
    End,
    Entered,
    Header,
    Observed,
    Record,
    Scope,
    Signature,
    Values,
)
from opgrip.traces.schema.tensor_specs import map_values
from opgrip.traces.values import ValueModel
from opgrip.traces.values.exact import Exact

# names of record types in the file
RECORD_NAMES: dict[type, str] = {cls: re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower() for cls in get_args(Record)}
REDACTED = "redacted"  # header field that marks a redacted trace and lists what was kept
# pattern of kernel names that compilers generate, which contain no path and no text
KERNEL = re.compile(r"[\w<>:,&*\[\]() =.~#{}-]{1,4096}")


@dataclass(frozen=True, slots=True)
class _TensorUse:
    """A tensor of a call whose value model must be redacted, with the sizes of the call's tensors and its results."""

    slot: TensorSlot
    facts: CallFacts
    outputs: Any


@dataclass(frozen=True, slots=True)
class _CallInfo:
    """Properties of a signature that are needed to redact records that refer to it.

    op, kind : operator and kind of the original signature
    slots : tensors of its arguments that can have value models
    """

    op: str
    kind: str
    slots: list[TensorSlot]
    facts: CallFacts


@dataclass(slots=True)
class _State:
    """Everything that a redaction remembers between records; it grows with value models and signatures, not with calls.

    models : value models of the original trace, by number
    numbers : number of each redacted value model, by `str(model)`
    newest : keys that the current record added to `numbers`
    awaited : by number of a value model that comes later in the file, the redacted models to make of that model, each
        as its number and the tensor that needs it
    kinds : kind of each operator
    """

    models: dict[int, ValueModel] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    newest: list[str] = field(default_factory=list)
    count: int = 0
    awaited: dict[int, list[tuple[int, _TensorUse]]] = field(default_factory=dict)
    calls: dict[int, _CallInfo] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)


class Redaction:
    """Redacts the records of one trace in file order; several threads may use it.

    Value models may get new numbers, because two operators may need different properties of one model. All other
    records keep their numbers.

    policy : kinds of names that stay, and salt of the hashes
    report : report of everything that stays, or None

    kept : number of value models that kept values or their order, by operator, argument and reason
    """

    def __init__(self, policy: Policy, report: RedactionReport | None = None) -> None:
        self.policy = policy
        self.names = NameHasher(policy)
        self.kept: Counter[tuple[str, str, str]] = Counter()
        self._report = report
        self._redactor = Redactor(policy, self.names, report)
        self._state = _State()
        self._lock = threading.RLock()

    @property
    def custom_operators(self) -> list[str]:
        """Names of operators that are not hashed, although not everybody can install their extension."""
        operators = (op for op, kind in self._state.kinds.items() if kind != FUNCTION and not op.startswith(REGION))
        return [op for op in operators if not is_public_operator(op) and not self.names.hides(op)]

    def records(self, record: Record) -> list[Record]:
        """Return the redacted record after the value models that it needs; an empty list for an unknown record type."""
        name = RECORD_NAMES.get(type(record))
        if name is None:
            return []
        # fields of some records depend on each other or on earlier records
        redact: Callable[[Any], Iterator[Record]] = getattr(self, f"_{name}", self._plain)
        with self._lock:
            self._state.newest = []
            return list(redact(record))

    def take_back(self) -> None:
        """Forget the value models that the last record added, because the record was not written completely."""
        with self._lock:
            for text in self._state.newest:
                self._state.numbers.pop(text, None)

    def _plain(self, record: Any, **replacements: Any) -> Iterator[Record]:
        yield self._redactor.fields(record, Position(RECORD_NAMES[type(record)]), **replacements)

    def _header(self, record: Header) -> Iterator[Record]:
        marks = {"kept": sorted(self.policy.keep), "operators_hidden": self.policy.hide_operators}
        yield Header({**self._redactor.fields(record, Position("header")).fields, REDACTED: marks})

    def _signature(self, record: Signature) -> Iterator[Record]:
        models, redacted, call = self._call(record, "signature")
        self._state.calls[record.number] = call
        self._state.kinds[record.op] = record.kind
        yield from (*models, redacted)

    def _observed(self, record: Observed) -> Iterator[Record]:
        call = self._state.calls.get(record.signature)
        if call is None or len(call.slots) != len(record.values):
            return
        facts = call_facts(call.facts.sizes | facts_of((), record.outputs).sizes, call.facts.extent, call.facts.pinned)
        models: list[Record] = []
        numbers = [
            self._number(replace(slot, number=number), facts, record.outputs, models)
            for slot, number in zip(call.slots, record.values, strict=True)
        ]
        outputs = self._redactor.outputs(call.op, "observed", record.outputs, facts)
        outputs = self._renumbered(call.op, "outputs", outputs, facts, None, models)
        yield from models
        yield from self._plain(record, values=numbers, outputs=outputs)

    def _effects(self, record: Effects) -> Iterator[Record]:
        after = None
        if record.after is not None:
            models, redacted, _ = self._call(Signature(record.signature, FUNCTION, "", *record.after), "effects.after")
            yield from models
            after = (redacted.args, redacted.kwargs)
        yield from self._plain(record, after=after)

    def _scope(self, record: Scope) -> Iterator[Record]:
        inside = record.inside
        if inside is not None:
            inside = self._redactor.operator("scope.inside", inside, FUNCTION if record.gripped else "")
        yield from self._plain(record, inside=inside, line=self.names.line(record.file, record.line))

    def _values(self, record: Values) -> Iterator[Record]:
        """Keep a value model for later calls; yield its redacted forms if earlier calls refer to it."""
        self._state.models[record.number] = record.model
        for number, use in self._state.awaited.pop(record.number, ()):
            redacted = self._redact(record.model, use)
            if redacted.model is not None:
                yield self._written(number, redacted.model)

    def _kernels(self, record: Kernels) -> Iterator[Record]:
        """Yield a record of kernels with their names hashed, except for kernels of operators whose names stay."""
        call = self._state.calls.get(record.signature)
        hidden = call is None or call.kind == FUNCTION or self.names.hides(call.op)
        names = [name if KERNEL.fullmatch(name) and not hidden else self.names.word(name) for name in record.names]
        for name, image in zip(record.names, names, strict=True):
            self._redactor.note("kernels.names", "kernel", name, image, "kernel of an operator whose name stays")
        yield from self._plain(record, names=names)

    def _entered(self, record: Entered) -> Iterator[Record]:
        opened = None
        if record.opened is not None:
            models, opened, _ = self._call(record.opened, "entered.opened")
            yield from models
        yield from self._plain(record, opened=opened)

    def _end(self, record: End) -> Iterator[Record]:
        yield from self._plain(
            record,
            dropped=self._dropped(record.dropped, "end.dropped"),
            passed_by=self._dropped(record.passed_by, "end.passed_by"),
            without_values=self._dropped(record.without_values, "end.without_values"),
            without_work=self._dropped(record.without_work, "end.without_work"),
        )

    def _dropped(self, items: Iterable[Dropped], field_name: str) -> list[Dropped]:
        redacted = []
        for item in items:
            kind = self._state.kinds.get(item.op)
            op = self.names.unrecorded(item.op) if kind is None else self.names.operator(item.op, kind)
            self._redactor.note(field_name, "operator", item.op, op, self.names.reason_of_operator(op))
            redacted.append(self._redactor.fields(item, Position(field_name), op=op))
        return redacted

    def _call(self, signature: Signature, record: str) -> tuple[list[Record], Signature, _CallInfo]:
        """Return the new value models of a call, its redacted signature, and the properties that later records need."""
        facts = facts_of((signature.args, signature.kwargs), signature.outputs)
        redacted = self._redactor.signature(signature, record, facts)
        models: list[Record] = []
        slots: list[TensorSlot] = []

        def renumber(place: int | str, tree: Any) -> Any:
            name, _ = argument_name(signature.op, place)
            return self._renumbered(signature.op, name, tree, facts, signature.outputs, models, slots)

        redacted = replace(
            redacted,
            args=tuple(renumber(place, tree) for place, tree in enumerate(redacted.args)),
            kwargs={
                name: renumber(place, tree)
                for place, (name, tree) in zip(signature.kwargs, redacted.kwargs.items(), strict=True)
            },
            outputs=self._renumbered(signature.op, "outputs", redacted.outputs, facts, None, models),
        )
        return models, redacted, _CallInfo(signature.op, signature.kind, slots, facts)

    def _renumbered(
        self,
        op: str,
        argument: str,
        tree: Any,
        facts: CallFacts,
        outputs: Any,
        models: list[Record],
        slots: list[TensorSlot] | None = None,
    ) -> Any:
        """Return an argument (`tree`, which may be nested) whose tensors refer to redacted value models.

        New value models are added to `models`, and the tensors that can have value models to `slots`.
        """

        def renumber(leaf: Any) -> Any:
            if not isinstance(leaf, TensorSpec):
                return leaf
            own = list(slots_of(op, argument, leaf))
            if slots is not None:
                slots.extend(own)
            numbers = iter([self._number(slot, facts, outputs, models) for slot in own])
            return map_values(lambda _: next(numbers), leaf)

        return map_leaves(renumber, tree)

    def _number(self, slot: TensorSlot, facts: CallFacts, outputs: Any, models: list[Record]) -> int | None:
        """Return the number of a tensor's redacted value model, or None; add the model to `models` if it is new."""
        state = self._state
        if slot.number is None:
            return None
        use = _TensorUse(slot, facts, outputs)
        model = state.models.get(slot.number)
        if model is None:
            # the model of a tensor on a device comes after its call
            number = self._next()
            state.awaited.setdefault(slot.number, []).append((number, use))
            return number
        redacted = self._redact(model, use)
        if redacted.model is None:
            return None
        # compared as text, because nan makes equal models unequal
        text = str(redacted.model)
        own_number = state.numbers.get(text)
        if own_number is None:
            state.newest.append(text)
            own_number = state.numbers[text] = self._next()
            models.append(self._written(own_number, redacted.model))
        return own_number

    def _redact(self, model: ValueModel, use: _TensorUse) -> RedactedModel:
        if self.policy.keeps(VALUES):
            return RedactedModel(model, "asked for")
        outputs = Opaque("") if use.outputs is None else use.outputs
        redacted = redact_model(model, use.slot, use.facts, outputs)
        if redacted.kept:
            self.kept[use.slot.op, use.slot.argument, redacted.kept] += 1
        return redacted

    def _written(self, number: int, model: ValueModel) -> Values:
        if self._report is not None and isinstance(model, Exact):
            self._report.add_values(model.data)
        return Values(number, model)

    def _next(self) -> int:
        self._state.count += 1
        return self._state.count - 1


@dataclass(frozen=True, slots=True)
class RedactedFile:
    """Result of redacting a file.

    report : texts and numbers that stay
    values : number of value models that kept values or their order, by operator, argument and reason
    passed_over : number of records and fields of a later version that were left out, by type
    whole_values : names of the files with full values next to the trace, which were left out
    missing : description of what is missing in a cut file
    """

    calls: int
    report: RedactionReport
    values: dict[tuple[str, str, str], int]
    passed_over: dict[str, int]
    whole_values: tuple[str, ...]
    missing: str | None

    def as_json(self) -> dict[str, object]:
        values = [
            {"op": op, "argument": argument, "why": why, "count": count}
            for (op, argument, why), count in sorted(self.values.items())
        ]
        others = {"passed_over": self.passed_over, "whole_values": list(self.whole_values)}
        return {**self.report.as_json(), "values": values, **others}


def redact(
    path: str | Path, output: Path, policy: Policy, force: bool = False, partial: bool = False, unbounded: bool = False
) -> RedactedFile:
    """Write a redacted copy of a trace. Memory grows with the trace's signatures and value models, not with its calls.

    policy : kinds of names that stay, and salt of the hashes
    force : replace an existing file
    partial : accept a cut or damaged trace
    unbounded : read records of any size and number; otherwise limits protect against hostile files

    Raises UserError if the trace cannot be read; nothing is written then.
    """
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
    unchanged, unknown = dict(redaction.kept), dict(reader.unknown)
    return RedactedFile(calls, report, unchanged, unknown, _whole_values(header), reader.missing)


def _whole_values(header: Header) -> tuple[str, ...]:
    """Return the names of the files with full tensor values that a trace's header refers to."""
    processes = header.fields.get("processes")
    headers = [header.fields, *(item for item in processes or () if isinstance(item, dict))]
    return tuple(str(fields[HEADER_FIELD]) for fields in headers if fields.get(HEADER_FIELD) is not None)
