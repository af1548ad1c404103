"""Which trace a row is of, where several were replayed together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from opgrip.replay.results.columns import Columns, column
from opgrip.replay.results.results import Result


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
