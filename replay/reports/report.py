"""What a report is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import IO, Any, Protocol

from opgrip.replay.measuring.results import Result
from opgrip.traces.registry import Registry


class Report(Protocol):
    """Writes results to a text file."""

    def __call__(self, results: Sequence[Result], header: Mapping[str, Any], file: IO[str]) -> None:
        """Write all results, the header saying where they come from."""


reports: Registry[Report] = Registry("opgrip.replay.reports", "opgrip.reports")
"""Reports by the suffix of the files that they write."""
