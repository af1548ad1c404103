"""What a source of cases is."""

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
    """What a source gives.

    Attributes
    ----------
    cases : those that are selected, by falling share of time
    trace : that they are of
    are_calls : whether they are single calls of the trace, which have neighbours there
    all_cases : all cases of the trace, where they had to be made
    has_run_code : whether functions were run to make them, after which a fork of this process could hang
    is_cut : whether they are already the part of them that `Cut` says
    """

    cases: list[Case]
    trace: Trace = NO_TRACE
    are_calls: bool = False
    all_cases: list[Case] | None = None
    has_run_code: bool = False
    is_cut: bool = False


class Source(Protocol):
    """Something that cases are made of.

    Attributes
    ----------
    lacks : what it has nothing for, of the words of `Option.only`; such options are refused, with `hint`
    place : among the sources, which are asked by it: the first that takes what a user names has it, a trace is the last
    in_program : whether its cases stand in a program, whose other calls run between theirs
    """

    lacks: Sequence[str]
    hint: str
    place: int
    in_program: bool

    def takes(self, target: str) -> bool:
        """Whether what a user names is of this kind."""

    def open(self, target: str, selection: Selection, extensions: Collection[str]) -> CaseSet:
        """The cases of what a user names.

        Parameters
        ----------
        extensions : modules whose functions may be called

        Raises
        ------
        UserError : where it cannot be read, or nothing of it is selected
        """

    def fingerprint(self, target: str) -> str:
        """A hash of what the cases are made of."""


sources: Registry[Source] = Registry("opgrip.replay.cases.sources", "opgrip.sources")
"""Sources by name."""


def source_of(target: str) -> Source:
    """What cases of something that a user names come from."""
    return next(source for source in sorted(sources.values(), key=lambda source: source.place) if source.takes(target))
