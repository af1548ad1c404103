"""Conditions that a comparison meets or not: `slower<=5%`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from opgrip.replay.comparing.comparison import Comparison
from opgrip.replay.comparing.verdicts import Verdict
from opgrip.replay.measuring.results import Result
from opgrip.traces.errors import UserError

_FORM = re.compile(r"\s*(\w+)\s*<=\s*(\d+(?:\.\d+)?)\s*(%?)\s*")
COUNTED: dict[str, Callable[[Comparison], list[Result]]] = {
    "failed": lambda comparison: [pair.new for pair in comparison.broken],
    "changed": lambda comparison: [pair.new for pair in comparison.changed],
    "missing": lambda comparison: list(comparison.missing),
}
"""What there may be so many of."""
NOTHING = "no case was timed in both runs"
HINT = "write 'slower<=5%', 'failed<=0', 'changed<=0' or 'missing<=0'"


@dataclass(frozen=True, slots=True)
class Gate:
    """A condition.

    Attributes
    ----------
    name : `slower`, or one of `COUNTED`
    most : of `slower` the relative difference that is allowed, else how many
    text : as it was given
    """

    name: str
    most: float
    text: str

    def problems(self, comparison: Comparison) -> list[str]:
        """Why it does not hold, a line each; none where it does."""
        rows = [f"{describe(row)}: {how}" for row, how in self.offenders(comparison)]
        return rows if self.can_be_held(comparison) else [*rows, NOTHING]

    def can_be_held(self, comparison: Comparison) -> bool:
        """Whether there is a time that could break it: runs of nothing in common would pass any gate."""
        return self.name != "slower" or any(pair.judgement is not None for pair in comparison.pairs)

    def offenders(self, comparison: Comparison) -> Iterator[tuple[Result, str]]:
        """The rows of the new run, or of the base where they are missing, that break it, and how."""
        if self.name != "slower":
            rows = COUNTED[self.name](comparison)
            yield from ((row, self.name) for row in rows) if len(rows) > self.most else ()
            return
        for pair in comparison.pairs:
            if pair.verdict is Verdict.SLOWER and pair.judgement and pair.judgement.ratio > 1 + self.most:
                yield pair.new, f"{pair.judgement.ratio - 1:.0%} slower"


def describe(row: Result) -> str:
    """A row in a line."""
    way = f"{row.mode}, {row.variant}" if row.variant else row.mode
    return f"{row.op} {row.shapes} ({way})"


def parse_gate(text: str) -> Gate:
    """A condition as a command line has it; `UserError` for what is none."""
    match = _FORM.fullmatch(text)
    if match is None or match[1] not in ("slower", *COUNTED) or (match[1] == "slower") != (match[3] == "%"):
        raise UserError(f"{text!r} is no gate", HINT)
    return Gate(match[1], float(match[2]) / (100 if match[3] else 1), text)
