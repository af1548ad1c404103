"""The trace that a row is of, and the machine that measured it."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from opgrip.platform.machine import processor
from opgrip.replay.results.columns import Columns, column
from opgrip.replay.results.results import Result

MACHINE = "OPGRIP_MACHINE"
"""Variable that names the machine where its host name says nothing, as in a container."""
_NAMED = 3
"""Machines that a header names where there are several."""


@dataclass(frozen=True, slots=True)
class MachineColumns(Columns):
    """Where a row was measured."""

    machine: str | None = column("that measured it: `$OPGRIP_MACHINE`, or the host's name")
    machine_kind: str | None = column("what that machine is: only rows of the same kind are merged and compared")


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine, and what its times depend on.

    Attributes
    ----------
    kind : the accelerator and the processor, and how many of these a replay has: times of other kinds do not mix
    """

    name: str
    kind: str

    def marked(self, row: Result) -> Result:
        """A row that says that it is of this machine; one that was not run here is of none."""
        return row.adding(MachineColumns(self.name, self.kind))

    def of_kind(self, kind: str) -> Machine:
        """The same machine, of a kind that whoever runs it says."""
        return replace(self, kind=kind)


def names_of(machines: Iterable[str]) -> str:
    """Some of them by name, and how many more."""
    names = sorted(machines)
    named = ", ".join(names[:_NAMED])
    return named if len(names) <= _NAMED else f"{named} and {len(names) - _NAMED} more"


def machine_name() -> str:
    """What this machine is called in a store: `$OPGRIP_MACHINE`, or its host name."""
    return os.environ.get(MACHINE) or socket.gethostname() or "machine"


def this_machine(device: str, processors: int | None = None) -> Machine:
    """The machine of this process, as far as a device's times depend on it.

    Parameters
    ----------
    processors : that a replay has; None for those of this process
    """
    count = len(os.sched_getaffinity(0)) if processors is None else processors
    parts = [" ".join(processor("cpu")[1:]).strip() or "a processor", f"{count} of them"]
    if device not in ("cpu", "meta"):
        parts.insert(0, processor(device)[0])
    return Machine(machine_name(), ", ".join(parts))


@dataclass(frozen=True, slots=True)
class OriginColumns(Columns):
    """The model that a row's trace is of."""

    model: str | None = column("that the trace is of, the same for all of its runs")
    run: str | None = column("what a step of it is, such as `predict` or `train`")
    library: str | None = column("whose model it is, where the zoo's manifest says it")
    family: str | None = column("the kind of model, where the zoo's manifest says it")


@dataclass(frozen=True, slots=True)
class Origin:
    """One of several traces.

    Attributes
    ----------
    trace : its name, which no other of them has
    model, run, library, family : as a row of the zoo's manifest has them; the last two may be empty
    """

    trace: str
    model: str
    run: str = ""
    library: str = ""
    family: str = ""

    def marked(self, row: Result) -> Result:
        """A row that says that it is of this trace."""
        about = OriginColumns(self.model, self.run or None, self.library or None, self.family or None)
        return replace(row.adding(about), trace=self.trace)

    def plain(self) -> dict[str, Any]:
        """By the names of its fields, as headers of results have it."""
        return asdict(self)


def origin_in(trace: str, about: Mapping[str, Any]) -> Origin:
    """A trace by what a header or a file says of it, which may be a stranger's; see `Origin.plain`."""
    words = {word: str(about.get(word) or "") for word in ("run", "library", "family")}
    return Origin(trace, str(about.get("model") or trace), **words)


def origin_of(row: Result) -> Origin:
    """The trace that a row is of."""
    about = OriginColumns.of(row)
    return Origin(row.trace, about.model or row.trace, about.run or "", about.library or "", about.family or "")
