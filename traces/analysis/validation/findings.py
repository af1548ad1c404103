"""What a validation finds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MOST = 10_000
"""Findings that are kept; others are counted."""

FORM, SCHEMA, NUMBER, REFERENCE, TIME, TOTAL = "form", "schema", "number", "reference", "time", "total"


@dataclass(frozen=True, slots=True)
class Finding:
    """Something wrong.

    Attributes
    ----------
    record : number of the record, counted from 1; of what is wrong with the whole file, the last one
    kind : `form` of a line that is no whole record, `schema` of one that the JSON Schema refuses, `number` of one that
        stands twice, `reference` of one that nothing has, `time` of calls that cross, `total` of counts that differ
    """

    record: int
    kind: str
    message: str


@dataclass(slots=True)
class Validation:
    """What is wrong in a file.

    Attributes
    ----------
    records : how many were read
    findings : in the order of the records, the first `MOST` of them
    counts : of all findings, by kind
    notes : what is not wrong and should be known
    """

    path: Path
    records: int = 0
    findings: list[Finding] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)

    def add(self, record: int, kind: str, message: str) -> None:
        """Note a finding."""
        self.counts[kind] += 1
        if len(self.findings) < MOST:
            self.findings.append(Finding(record, kind, message))

    def as_json(self) -> dict[str, Any]:
        """What a file of findings holds."""
        return {
            "trace": str(self.path),
            "records": self.records,
            "counts": dict(sorted(self.counts.items())),
            "notes": self.notes,
            "findings": [{"record": item.record, "kind": item.kind, "message": item.message} for item in self.findings],
        }
