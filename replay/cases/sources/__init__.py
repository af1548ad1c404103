"""Sources of cases, each of which reads one kind of target, such as traces or samples."""

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
    """The cases of one target, such as a trace or a folder of samples.

    are_calls : True if each case represents single calls of a trace, for which preceding calls are known
    all_cases : all cases of the trace, if the selection includes all of them; else None
    is_cut : True if the source has already applied `--start`, `--stop` and `--sample`
    """

    cases: list[Case]
    trace: Trace = NO_TRACE
    are_calls: bool = False
    all_cases: list[Case] | None = None
    has_run_code: bool = False
    is_cut: bool = False


class Source(Protocol):
    """Reads one kind of target that a user can name on the command line.

    lacks : kinds of input, such as `traces` and `samples`, that this source does not read
    place : position in the order of sources; the first source whose `takes` returns True is used
    """

    lacks: Sequence[str]
    hint: str
    place: int
    in_program: bool

    def takes(self, target: str) -> bool: ...

    def open(self, target: str, selection: Selection, extensions: Collection[str]) -> CaseSet: ...

    def fingerprint(self, target: str) -> str: ...


sources: Registry[Source] = Registry("opgrip.replay.cases.sources", "opgrip.sources")


def source_of(target: str) -> Source:
    return next(source for source in sorted(sources.values(), key=lambda source: source.place) if source.takes(target))
