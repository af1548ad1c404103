"""Report of a redaction: every text and exact value that stays in the trace, where it stands, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import astuple, dataclass, field
from typing import Any

from opgrip.traces.analysis.redaction.names import SALTED

ASKED = "kept by --keep"
MOST = 100_000
"""Distinct texts and numbers that are listed; further ones are counted."""


@dataclass(frozen=True, slots=True)
class Remaining:
    """A text or number that stays.

    Attributes
    ----------
    field : of the record, such as `signature.args`
    kind : what it is: `operator`, `string`, `integer`, ...
    """

    field: str
    kind: str
    value: str
    why: str


@dataclass(slots=True)
class Report:
    """Everything that stays in a trace, with how often it occurs, and the hashes in place of the rest."""

    counts: Counter[Remaining] = field(default_factory=Counter)
    others: int = 0
    salted: set[str] = field(default_factory=set)

    def add_text(self, name: str, kind: str, text: str, image: str, why: str) -> None:
        """Add a text and what became of it."""
        if image != text or SALTED.search(image):
            self.salted.update(SALTED.findall(image))
        elif text:
            self._add(Remaining(".".join(name.split(".")[:2]), kind, text, why))

    def add_number(self, name: str, op: str, image: float, why: str) -> None:
        """Add a number among the arguments of an operator."""
        self._add(Remaining(name, "integer" if isinstance(image, int) else "float", f"{op}: {image}", why))

    def add_values(self, data: object) -> None:
        """Add the exact values of a tensor."""
        why = "sizes and places in memory, or values in the order of others: see `values`"
        self._add(Remaining("values.data", "exact values", str(data), why))

    def rows(self) -> Iterator[tuple[str, str, int, str]]:
        """Yield field, kind, number of distinct ones, and reason, of everything that stays."""
        groups: Counter[tuple[str, str, str]] = Counter((left.field, left.kind, left.why) for left in self.counts)
        for (name, kind, why), count in sorted(groups.items()):
            yield name, kind, count, why

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON."""
        rows = [
            {"field": left.field, "kind": left.kind, "value": left.value, "why": left.why, "count": count}
            for left, count in sorted(self.counts.items(), key=lambda item: astuple(item[0]))
        ]
        return {"salted_names": len(self.salted), "left": rows, "not_listed": self.others}

    def _add(self, left: Remaining) -> None:
        if left in self.counts or len(self.counts) < MOST:
            self.counts[left] += 1
        else:
            self.others += 1
