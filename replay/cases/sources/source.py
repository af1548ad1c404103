"""The interface of a source of cases."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import pandas as pd

from opgrip.cli.plugins import Registry
from opgrip.replay.cases.cases import Case
from opgrip.replay.cases.selection import Selection
from opgrip.traces import Trace

NO_TRACE = Trace({}, [], [], {}, pd.DataFrame())


@dataclass(frozen=True, slots=True)
class CaseSet:
    """Cases from one source.

    cases : the selected ones, by falling share of time
    are_calls : True if they are single calls of a trace, which have preceding calls
    all_cases : all cases of the trace, if they were made
    has_run_code : True if functions were run to make them; forks of this process could then hang
    is_cut : True if `Cut` was applied already
    """

    cases: list[Case]
    trace: Trace = NO_TRACE
    are_calls: bool = False
    all_cases: list[Case] | None = None
    has_run_code: bool = False
    is_cut: bool = False


class Source(Protocol):
    """A source of cases.

    lacks : words of `Option.only`; options for these are refused, with `hint`
    place : sources are asked in this order, and the first that takes a target has it
    in_program : True if its cases have preceding calls
    """

    lacks: Sequence[str]
    hint: str
    place: int
    in_program: bool

    def takes(self, target: str) -> bool: ...

    def open(self, target: str, selection: Selection, extensions: Collection[str]) -> CaseSet:
        """Return the cases of a target; raise `UserError` if it cannot be read or nothing is selected."""

    def fingerprint(self, target: str) -> str:
        """Return a hash of what the cases are made from."""


sources: Registry[Source] = Registry("opgrip.replay.cases.sources", "opgrip.sources")


def source_of(target: str) -> Source:
    return next(source for source in sorted(sources.values(), key=lambda source: source.place) if source.takes(target))
