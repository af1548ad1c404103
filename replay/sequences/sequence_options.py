"""Whether a trace is run as one sequence."""

from __future__ import annotations

from dataclasses import dataclass

from opgrip.cli.options import IDENTITY, option, titled


@titled("how they are run")
@dataclass(frozen=True, slots=True)
class SequenceOptions:
    """Whether a trace is run as one."""

    sequence: bool = option(
        False,
        "run all calls in their order on what flows between them, for the time and memory of the whole step",
        only=("traces", "one trace"),
        role=IDENTITY,
        column="method",
    )
