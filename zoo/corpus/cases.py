"""Writes chosen signatures of a corpus as one trace, with one case per signature."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from opgrip.platform.machine import page_size
from opgrip.replay.cases.cases import contexts_of
from opgrip.traces.io.writer import TraceWriter
from opgrip.traces.schema.arguments import numbers_of, with_numbers
from opgrip.traces.schema.records import (
    NO_STORAGE,
    Calls,
    Context,
    End,
    Header,
    Observed,
    Record,
    Scope,
    Signature,
    Thread,
    Values,
)
from opgrip.traces.table.trace import Trace, load
from opgrip.zoo.corpus.corpus import Corpus, Reading, written_from

PAGE_BYTES = 4096  # page size of the trace that is written


@dataclass(frozen=True, slots=True)
class Surrounding:
    """How many recorded calls of each signature to write, and how many of the calls before them.

    places : number of calls of the signature to write, evenly spaced over all of its calls
    before : number of calls to write before each of them; they affect its time through the caches
    """

    places: int = 1
    before: int = 0


ALONE, IN_PROGRAM = Surrounding(), Surrounding(places=8, before=48)


def write_cases(
    corpus: Corpus,
    keys: Sequence[str],
    path: Path,
    force: bool = False,
    unbounded: bool = False,
    reading: Reading = lambda path: nullcontext(),
    fields: Mapping[str, Any] | None = None,
    surrounding: Surrounding = ALONE,
) -> int:
    """Write a trace with calls of chosen signatures, and return how many signatures were written.

    The calls of a signature are taken from the trace of the corpus that spends the most time on it. In the new trace,
    the signature of `keys[n]` has the number `n` and the same key, and the module path of its calls is the name of the
    model. Signatures of calls that only precede such a call have higher numbers.

    reading : returns a context manager to enter while a file is read
    fields : additional fields of the new trace's header
    """
    numbers = {key: number for number, key in enumerate(keys)}
    chosen = written_from(corpus.frame, keys)
    facts = {"model": {"name": "corpus", "run": "cases"}, "torch": torch.__version__, "steps": 1}
    header = Header({**facts, "page_size": PAGE_BYTES, **(fields or {})})
    numbering = _Numbering(len(keys))
    with TraceWriter(path, header, force) as writer:
        writer.write(Thread(0, "main"))
        for member in corpus.members:
            own = chosen[chosen["trace"] == member.name]
            if not own.empty:
                columns = (own[name].tolist() for name in ("signature", "key", "median_us"))
                cases = {number: (numbers[key], us) for number, key, us in zip(*columns, strict=True)}
                with reading(member.path):
                    trace = load(member.path, True, unbounded)
                for record in _CaseRecords(member.model, trace, cases, numbering).all(surrounding):
                    writer.write(record)
        writer.write(End(numbering.calls, numbering.signatures, numbering.now_ns))
    return len(chosen)


class _Numbering:
    def __init__(self, cases: int) -> None:
        self.calls = self.signatures = self.now_ns = 0
        self.newest = NO_STORAGE
        self.others = count(cases)
        self.values = count()
        self.scopes = count()
        self.storages = count()


class _CaseRecords:
    def __init__(self, model: str, trace: Trace, cases: Mapping[int, tuple[int, float]], numbering: _Numbering) -> None:
        self._model, self._trace, self._chosen, self._new = model, trace, cases, numbering
        self._signatures = {signature.number: signature for signature in trace.signatures}
        self._usual = contexts_of(trace, trace.own_calls)
        self._contexts = {scope.number: trace.contexts.get(scope.context or 0, {}) for scope in trace.scopes}
        self._page = page_size(trace.header) or 0
        self._numbers: dict[tuple[int, bool], int] = {}
        self._scopes: dict[str, int] = {}

    def all(self, surrounding: Surrounding) -> Iterator[Record]:
        for calls, are_cases in _stretches(self._trace.own_calls, self._chosen, surrounding):
            yield from self._definitions(calls, are_cases)
            yield self._block(calls, are_cases)

    def _definitions(self, calls: pd.DataFrame, are_cases: Sequence[bool]) -> Iterator[Record]:
        for number, scope, is_case in zip(calls["signature"].tolist(), calls["scope"].tolist(), are_cases, strict=True):
            settings = self._settings(number, scope, is_case)
            if repr(settings) not in self._scopes:
                index = self._scopes[repr(settings)] = next(self._new.scopes)
                yield Context(index, dict(settings))
                yield Scope(index, self._model, "", "forward", context=index)
            if (number, is_case) not in self._numbers:
                own = self._numbers[number, is_case] = self._chosen[number][0] if is_case else next(self._new.others)
                yield from self._definition(self._signatures[number], own)
                if is_case:
                    yield from self._observed(self._signatures[number], own)

    def _settings(self, number: int, scope: int, is_case: bool) -> Mapping[str, Any]:
        return self._usual.get(number, {}) if is_case else self._contexts.get(scope, {})

    def _definition(self, signature: Signature, own_number: int) -> Iterator[Record]:
        arguments = (signature.args, signature.kwargs)
        values, renumbered = self._values(numbers_of(arguments))
        yield from values
        args, kwargs = with_numbers(arguments, renumbered)
        self._new.signatures += 1
        outputs = _without_values(signature.outputs)
        yield replace(signature, number=own_number, args=args, kwargs=kwargs, outputs=outputs)

    def _observed(self, signature: Signature, own_number: int) -> Iterator[Record]:
        for item in self._trace.observed.get(signature.number, ()):
            values, renumbered = self._values(item.values)
            yield from values
            yield Observed(own_number, renumbered, _without_values(item.outputs))

    def _values(self, numbers: Iterable[int | None]) -> tuple[list[Record], list[int | None]]:
        numbers, own = list(numbers), {}
        own_numbers = dict.fromkeys(number for number in numbers if number is not None and number in self._trace.values)
        for number in own_numbers:
            own[number] = next(self._new.values)
        records: list[Record] = [Values(here, self._trace.values[number]) for number, here in own.items()]
        return records, [None if number is None else own.get(number) for number in numbers]

    def _block(self, calls: pd.DataFrame, are_cases: Sequence[bool]) -> Calls:
        columns = (calls[name].tolist() for name in ("signature", "scope", "time_ns", "perturbed", "page_faults"))
        block = Calls(0, [], [], [], [], calls["tensors"].tolist(), self._memory(calls), self._new.newest)
        for index, (is_case, number, scope, time_ns, is_perturbed, faults) in enumerate(
            zip(are_cases, *columns, strict=True)
        ):
            block.signature.append(self._numbers[number, is_case])
            block.scope.append(self._scopes[repr(self._settings(number, scope, is_case))])
            block.start_ns.append(self._new.now_ns)
            block.duration_ns.append(max(round(self._chosen[number][1] * 1e3 if is_case else time_ns), 1))
            self._new.now_ns += block.duration_ns[-1]
            # all calls of a case get its median time, so they are not marked as perturbed
            if is_perturbed and not is_case:
                block.perturbed.append((index, 1))
            if faults * self._page >= PAGE_BYTES:
                block.page_faults.append((index, faults * self._page // PAGE_BYTES))
        self._new.calls += len(calls)
        self._new.newest = max(self._new.newest, *block.storages, NO_STORAGE)
        return block

    def _memory(self, calls: pd.DataFrame) -> list[int]:
        numbers = {NO_STORAGE: NO_STORAGE}
        memory: list[int] = []
        for first, tensors in zip(calls["first_storage"].tolist(), calls["tensors"].tolist(), strict=True):
            for number in self._trace.storages[first : first + tensors].tolist():
                if number not in numbers:
                    numbers[number] = next(self._new.storages)
                memory.append(numbers[number])
        return memory


def _without_values(outputs: Any) -> Any:
    return with_numbers(outputs, [None] * len(numbers_of(outputs)))


def _stretches(
    calls: pd.DataFrame, chosen_signatures: Mapping[int, object], surrounding: Surrounding
) -> Iterator[tuple[pd.DataFrame, list[bool]]]:
    chosen: list[int] = []
    for _, rows in calls[calls["signature"].isin(list(chosen_signatures))].groupby("signature", sort=False):
        calm = rows[~rows["perturbed"].astype(bool)]
        usual = rows if calm.empty else calm
        steps = np.linspace(0, len(usual) - 1, min(len(usual), surrounding.places)).astype(int)
        chosen += usual.index[steps].tolist()
    for _, own in calls.groupby(["process", "thread"], sort=False, observed=True, dropna=False):
        is_case = own.index.isin(chosen)
        is_written = is_case.copy()
        for index in np.flatnonzero(is_case).tolist():
            is_written[max(0, index - surrounding.before) : index] = True
        edges = np.flatnonzero(np.diff(is_written.astype(np.int8), prepend=0, append=0)).tolist()
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            yield own.iloc[start:end], is_case[start:end].tolist()
