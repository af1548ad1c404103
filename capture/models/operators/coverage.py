"""What of the operators was run, what failed, and what no sample covers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opgrip.cli.command import counted
from opgrip.cli.output_files import whole_file
from opgrip.errors import one_line

MOST_REASON = 200
"""Characters of a reason."""


@dataclass(slots=True)
class Coverage:
    """What became of the samples of a capture.

    Attributes
    ----------
    entries : that were run
    samples : calls that are in the trace
    operators : of torch that they call
    failures : samples that failed, by operator, dtype and reason
    uncovered : registered operators that no sample calls, with the reason
    """

    entries: int = 0
    samples: int = 0
    operators: set[Any] = field(default_factory=set)
    failures: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    uncovered: dict[str, str] = field(default_factory=dict)

    def fail(self, name: str, dtype: str, error: BaseException | str) -> None:
        """Count a sample that failed."""
        reason = error if isinstance(error, str) else one_line(error)
        self.failures[name, dtype, reason[:MOST_REASON]] += 1

    def lines(self, path: Path | None) -> Iterator[str]:
        """What to tell of it.

        Parameters
        ----------
        path : of the file that has all of it; None where none was asked for
        """
        names = {str(function) for function in self.operators}
        yield (
            f"{counted(len(names), 'operator')} by {counted(self.samples, 'sample')} of "
            f"{counted(self.entries, 'entry', 'entries')}"
        )
        missing = []
        if self.failures:
            missing.append(f"{counted(self.failures.total(), 'sample')} failed")
        if self.uncovered:
            missing.append(f"{counted(len(self.uncovered), 'operator has', 'operators have')} no sample")
        if missing:
            where = f"{path} names them" if path is not None else "--uncovered FILE names them"
            yield f"{', '.join(missing)}: {where}"

    def write(self, path: Path, force: bool) -> None:
        """Write what failed and what is not covered, as JSON."""
        form = {
            "operators": sorted(map(str, self.operators)),
            "failed": [
                {"entry": name, "dtype": dtype, "reason": reason, "samples": count}
                for (name, dtype, reason), count in sorted(self.failures.items())
            ],
            "uncovered": [{"op": op, "reason": reason} for op, reason in sorted(self.uncovered.items())],
        }
        with whole_file(path, force) as file:
            file.write(json.dumps(form, indent=1).encode() + b"\n")
