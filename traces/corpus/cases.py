"""Some signatures of a corpus as one trace, each once, however many models have it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import torch

from opgrip.traces.arguments import numbers_of, with_numbers
from opgrip.traces.corpus.corpus import Corpus, Reading
from opgrip.traces.corpus.members import Member
from opgrip.traces.corpus.rows import contexts_of
from opgrip.traces.records import Calls, Context, End, Header, Record, Scope, Signature, Thread, Values
from opgrip.traces.trace import Trace, load
from opgrip.traces.writer import TraceWriter


def write_cases(
    corpus: Corpus,
    keys: Collection[str],
    path: Path,
    force: bool = False,
    unbounded: bool = False,
    reading: Reading = lambda path: nullcontext(),
    fields: Mapping[str, Any] | None = None,
) -> int:
    """Write a trace with one call of each signature, as the first trace of the corpus has it; how many there are.

    Calls are in a module of the name of the model. A signature has its key in this trace too. The files of the corpus
    are read again, as far as they have such signatures, one at a time.

    Parameters
    ----------
    keys : of the signatures
    fields : of the header, besides its own
    """
    chosen = corpus.frame[corpus.frame["key"].isin(set(keys))].drop_duplicates("key")
    facts = {"model": {"name": "corpus", "run": "cases"}, "torch": torch.__version__, "steps": 1, **(fields or {})}
    writer = TraceWriter(path, Header(facts), force)
    records = _CaseRecords()
    try:
        writer.write(Thread(0, "main"))
        for member in corpus.members:
            numbers = chosen.loc[chosen["trace"] == member.name, "signature"].tolist()
            if numbers:
                medians_us = chosen.loc[chosen["trace"] == member.name, "median_us"].tolist()
                medians = dict(zip(numbers, medians_us, strict=True))
                for record in records.of(member, _loaded(member, unbounded, reading(member.path)), medians):
                    writer.write(record)
        writer.write(End(records.calls, records.calls, records.now_ns))
        writer.close()
    except BaseException:
        writer.discard()
        raise
    return records.calls


def _loaded(member: Member, unbounded: bool, reading: AbstractContextManager[object]) -> Trace:
    with reading:
        return load(member.path, True, unbounded)


class _CaseRecords:
    """Makes the records, numbered anew.

    Attributes
    ----------
    calls : that were made
    now_ns : when the next one begins
    """

    def __init__(self) -> None:
        self.calls = 0
        self.now_ns = 0
        self._values = count()
        self._places = count()

    def of(self, member: Member, trace: Trace, medians_us: Mapping[int, float]) -> Iterator[Record]:
        """The records of some signatures of a trace, by their numbers there."""
        contexts = contexts_of(trace)
        places: dict[str, int] = {}
        for signature in trace.signatures:
            if signature.number not in medians_us:
                continue
            settings = contexts.get(signature.number, {})
            place = places.get(repr(settings))
            if place is None:
                place = places[repr(settings)] = next(self._places)
                yield Context(place, dict(settings))
                yield Scope(place, member.model, "", "forward", context=place)
            yield from self._signature(signature, trace)
            duration_ns = max(round(medians_us[signature.number] * 1e3), 1)
            yield Calls(0, [self.calls], [place], [self.now_ns], [duration_ns])
            self.calls += 1
            self.now_ns += duration_ns

    def _signature(self, signature: Signature, trace: Trace) -> Iterator[Record]:
        arguments = (signature.args, signature.kwargs)
        numbers: dict[int, int] = {}
        for number in numbers_of(arguments):
            if number is not None and number in trace.values and number not in numbers:
                numbers[number] = next(self._values)
                yield Values(numbers[number], trace.values[number])
        renumbered = [None if number is None else numbers.get(number) for number in numbers_of(arguments)]
        args, kwargs = with_numbers(arguments, renumbered)
        outputs: Any = with_numbers(signature.outputs, [None] * len(numbers_of(signature.outputs)))
        yield replace(signature, number=self.calls, args=args, kwargs=kwargs, outputs=outputs)
