"""Redacts the records of a trace one by one: the same for a file that goes out, and for one that is being recorded."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from opgrip.traces.analysis.redaction.arguments import Arguments
from opgrip.traces.analysis.redaction.headers import redact_accelerator, redact_devices, redact_header, redact_settings
from opgrip.traces.analysis.redaction.models import Redacted, redact_model
from opgrip.traces.analysis.redaction.names import LIMIT, REGION, Names, is_public_operator
from opgrip.traces.analysis.redaction.policy import VALUES, Policy
from opgrip.traces.analysis.redaction.redacted_calls import (
    CallFacts,
    Slot,
    argument_name,
    call_facts,
    facts_of,
    slots_of,
)
from opgrip.traces.schema.arguments import Opaque, TensorSpec, map_leaves
from opgrip.traces.schema.records import (
    FUNCTION,
    PHASES,
    THINNED,
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
from opgrip.traces.schema.tensor_specs import map_values
from opgrip.traces.values import ValueModel

KERNEL = re.compile(r"[\w<>:,&*\[\]() =.~#{}-]{1,4096}")
"""What a compiler makes of names: no path, and no text."""


@dataclass(frozen=True, slots=True)
class _Use:
    """A tensor of a call whose values are redacted."""

    slot: Slot
    facts: CallFacts
    outputs: Any


@dataclass(slots=True)
class _Call:
    """What a later look at a signature needs of it."""

    op: str
    kind: str
    slots: list[Slot]
    facts: CallFacts


@dataclass(slots=True)
class _State:
    """What a redaction remembers; it grows with the value models and the signatures, and not with the calls."""

    models: dict[int, ValueModel] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    newest: list[str] = field(default_factory=list)
    count: int = 0
    awaited: dict[int, list[tuple[int, _Use]]] = field(default_factory=dict)
    calls: dict[int, _Call] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)


class Redaction:
    """One trace's redaction; may be asked by several threads.

    Records keep their numbers but those of value models: one model that two operators need different things of becomes
    two.

    Attributes
    ----------
    kept : why values, or their order, stayed, with how many models did: by operator and argument
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.names = Names(policy)
        self.kept: Counter[tuple[str, str, str]] = Counter()
        self._arguments = Arguments(policy, self.names)
        self._state = _State()
        self._lock = threading.RLock()

    @property
    def custom_operators(self) -> list[str]:
        """Operators so far whose names stay though not everybody can install them."""
        operators = (op for op, kind in self._state.kinds.items() if kind != FUNCTION and not op.startswith(REGION))
        return [op for op in operators if not is_public_operator(op) and not self.names.hides(op)]

    def records(self, record: Record) -> list[Record]:
        """What a record becomes: itself without what is private, after the value models that it needs."""
        redact = _REDACTIONS.get(type(record))
        # a type of record that is not named here does not go out
        if redact is None:
            return []
        with self._lock:
            self._state.newest = []
            return list(redact(self, record))

    def take_back(self) -> None:
        """Forget the value models of the last record, which are not written since something interrupted that."""
        with self._lock:
            for text in self._state.newest:
                self._state.numbers.pop(text, None)

    def header(self, record: Header) -> Iterator[Record]:
        """The header, of the fields that stay."""
        yield Header(redact_header(record.fields, self.policy, self.names))

    def signature(self, record: Signature) -> Iterator[Record]:
        """A signature, and the models of what it takes."""
        models, redacted, call = self._call(record)
        self._state.calls[record.number] = call
        self._state.kinds[record.op] = record.kind
        yield from (*models, redacted)

    def observed(self, record: Observed) -> Iterator[Record]:
        """A later look at a signature, and the models of what it met."""
        call = self._state.calls.get(record.signature)
        if call is None or len(call.slots) != len(record.values):
            return
        facts = call_facts(call.facts.sizes | facts_of((), record.outputs).sizes, call.facts.extent, call.facts.pinned)
        models: list[Record] = []
        numbers = [
            self._number(replace(slot, number=number), facts, record.outputs, models)
            for slot, number in zip(call.slots, record.values, strict=True)
        ]
        outputs = self._renumbered(
            call.op, "outputs", self._arguments.outputs(call.op, record.outputs, facts), facts, None, models
        )
        redacted = Observed(record.signature, numbers, outputs, record.since_ns, record.storage)
        yield from (*models, redacted)

    def effects(self, record: Effects) -> Iterator[Record]:
        """What is known of a sample's call, but for the random state, which tells a seed."""
        after = None
        models: list[Record] = []
        if record.after is not None:
            signature = Signature(record.signature, FUNCTION, "", *record.after)
            models, redacted, _ = self._call(signature)
            after = (redacted.args, redacted.kwargs)
        yield from (*models, Effects(record.signature, record.operators, record.operator_ns, after))

    def scope(self, record: Scope) -> Iterator[Record]:
        """A scope, its names hashed."""
        names = self.names
        yield Scope(
            number=record.number,
            module=names.module(record.module),
            module_type=names.class_name(record.module_type),
            phase=record.phase if record.phase in PHASES else "forward",
            inside=None if record.inside is None else names.operator(record.inside, FUNCTION if record.gripped else ""),
            function=names.function(record.function),
            file=names.file(record.file),
            line=names.line(record.file, record.line),
            callers=tuple(map(names.caller, record.callers)),
            context=record.context,
            forward=record.forward,
            gripped=record.gripped,
        )

    def context(self, record: Context) -> Iterator[Record]:
        """Torch's settings."""
        yield Context(record.number, redact_settings(record.settings))

    def values(self, record: Values) -> Iterator[Record]:
        """Nothing, until a call refers to it; the models that calls referred to before it came."""
        self._state.models[record.number] = record.model
        for number, use in self._state.awaited.pop(record.number, ()):
            redacted = self._redact(record.model, use)
            if redacted.model is not None:
                yield Values(number, redacted.model)

    def thread(self, record: Thread) -> Iterator[Record]:
        """A thread, its name hashed where it is none of torch's."""
        yield Thread(record.number, self.names.thread(record.name), record.process)

    def kernels(self, record: Kernels) -> Iterator[Record]:
        """Kernels: those of operators whose names stay keep theirs, those of the program's functions do not."""
        call = self._state.calls.get(record.signature)
        hidden = call is None or call.kind == FUNCTION or self.names.hides(call.op)
        names = [name if KERNEL.fullmatch(name) and not hidden else self.names.word(name) for name in record.names]
        yield Kernels(record.signature, names, list(record.launches), list(record.device_ns))

    def entered(self, record: Entered) -> Iterator[Record]:
        """A call that had not ended."""
        models: list[Record] = []
        opened = None
        if record.opened is not None:
            models, opened, _ = self._call(record.opened)
        redacted = Entered(record.thread, record.start_ns, record.scope, record.signature, opened)
        yield from (*models, redacted)

    def end(self, record: End) -> Iterator[Record]:
        """Totals."""
        stopped = record.stopped
        yield End(
            calls=record.calls,
            signatures=record.signatures,
            duration_ns=record.duration_ns,
            dropped=self._dropped(record.dropped),
            passed_by=self._dropped(record.passed_by),
            without_values=self._dropped(record.without_values),
            stopped=stopped if stopped is None or LIMIT.fullmatch(stopped) else self.names.word(stopped),
            devices=redact_devices(record.devices),
            accelerator=redact_accelerator(record.accelerator),
            before=record.before,
            thinned={what: count for what, count in record.thinned.items() if what in THINNED},
            contended=record.contended,
            step_starts_ns=record.step_starts_ns,
        )

    def calls(self, record: Calls) -> Iterator[Record]:
        """When calls ran, and how long: as it is."""
        yield Calls(
            *(record.thread, record.signature, record.scope, record.start_ns, record.duration_ns, record.tensors),
            *(record.storages, record.newest, record.device_ns, record.page_faults, record.streams, record.perturbed),
            record.slow_memory,
        )

    def device_times(self, record: DeviceTimes) -> Iterator[Record]:
        """How long calls kept an accelerator busy: as it is."""
        yield DeviceTimes(record.thread, record.first, record.device_ns)

    def _dropped(self, items: Iterable[Dropped]) -> list[Dropped]:
        return [Dropped(self._lost(item.op), self._reason(item.reason), item.count) for item in items]

    def _lost(self, name: str) -> str:
        kind = self._state.kinds.get(name)
        return self.names.unrecorded(name) if kind is None else self.names.operator(name, kind)

    def _reason(self, reason: str) -> str:
        before, run_by, classes = reason.partition("run by ")
        if run_by and not before:
            return run_by + ", ".join(map(self.names.class_name, classes.split(", ")))
        return self.names.error(reason)

    def _call(self, signature: Signature) -> tuple[list[Record], Signature, _Call]:
        """The models that a call needs, the call, and what later looks at it need."""
        facts = facts_of((signature.args, signature.kwargs), signature.outputs)
        redacted = self._arguments.of(signature, facts)
        models: list[Record] = []
        slots: list[Slot] = []

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
        return models, redacted, _Call(signature.op, signature.kind, slots, facts)

    def _renumbered(
        self,
        op: str,
        argument: str,
        tree: Any,
        facts: CallFacts,
        outputs: Any,
        models: list[Record],
        slots: list[Slot] | None = None,
    ) -> Any:
        """A tree with the numbers of redacted models; the models that are new, and the tree's slots, are added."""

        def renumber(leaf: Any) -> Any:
            if not isinstance(leaf, TensorSpec):
                return leaf
            own = list(slots_of(op, argument, leaf))
            if slots is not None:
                slots.extend(own)
            numbers = iter([self._number(slot, facts, outputs, models) for slot in own])
            return map_values(lambda _: next(numbers), leaf)

        return map_leaves(renumber, tree)

    def _number(self, slot: Slot, facts: CallFacts, outputs: Any, models: list[Record]) -> int | None:
        """The number of a tensor's redacted model, which is added to the models where it is new."""
        state = self._state
        if slot.number is None:
            return None
        use = _Use(slot, facts, outputs)
        model = state.models.get(slot.number)
        if model is None:
            # of a tensor on a device, it comes later
            number = self._next()
            state.awaited.setdefault(slot.number, []).append((number, use))
            return number
        redacted = self._redact(model, use)
        if redacted.model is None:
            return None
        # by its text: nan makes equal models unequal
        text = str(redacted.model)
        known = state.numbers.get(text)
        if known is None:
            state.newest.append(text)
            known = state.numbers[text] = self._next()
            models.append(Values(known, redacted.model))
        return known

    def _redact(self, model: ValueModel, use: _Use) -> Redacted:
        if self.policy.keeps(VALUES):
            return Redacted(model, "asked for")
        outputs = Opaque("") if use.outputs is None else use.outputs
        redacted = redact_model(model, use.slot, use.facts, outputs)
        if redacted.kept:
            self.kept[use.slot.op, use.slot.argument, redacted.kept] += 1
        return redacted

    def _next(self) -> int:
        self._state.count += 1
        return self._state.count - 1


_REDACTIONS: dict[type, Callable[[Redaction, Any], Iterator[Record]]] = {
    Header: Redaction.header,
    Signature: Redaction.signature,
    Observed: Redaction.observed,
    Effects: Redaction.effects,
    Scope: Redaction.scope,
    Context: Redaction.context,
    Values: Redaction.values,
    Thread: Redaction.thread,
    Calls: Redaction.calls,
    DeviceTimes: Redaction.device_times,
    Kernels: Redaction.kernels,
    Entered: Redaction.entered,
    End: Redaction.end,
}
