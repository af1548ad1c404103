"""What a source of cases is."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import pandas as pd

from opgrip.replay.cases.cases import Case
from opgrip.replay.cases.selection import Selection
from opgrip.traces import Trace
from opgrip.traces.registry import Registry

NO_TRACE = Trace({}, [], [], {}, pd.DataFrame())


@dataclass(frozen=True, slots=True)
class Opened:
    """What a source gives.

    Attributes
    ----------
    cases : those that are selected, by falling share of time
    trace : that they are of
    are_calls : whether they are single calls of the trace, which have neighbours there
    all_cases : all cases of the trace, where they had to be made
    ran : whether functions were run to make them, after which a fork of this process could hang
    """

    cases: list[Case]
    trace: Trace = NO_TRACE
    are_calls: bool = False
    all_cases: list[Case] | None = None
    ran: bool = False


class Source(Protocol):
    """Something that cases are made of.

    Attributes
    ----------
    lacks : what it has nothing for, of the words of `Option.only`; such options are refused, with `hint`
    in_program : whether its cases stand in a program, whose other calls run between theirs
    """

    lacks: Sequence[str]
    hint: str
    in_program: bool

    def takes(self, target: str) -> bool:
        """Whether what a user names is of this kind."""

    def open(self, target: str, selection: Selection, extensions: Collection[str]) -> Opened:
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
"""Sources by name; a file that none takes is a trace."""


def source_of(target: str) -> Source:
    """What cases of something that a user names come from."""
    takers = (source for name, source in sources.items() if name != "trace" and source.takes(target))
    source = next(takers, None) or sources.get("trace")
    assert source is not None, "it is a file beside this one"
    return source
