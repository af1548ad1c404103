"""What the processes may take that cases run in."""

from __future__ import annotations

import os
from dataclasses import dataclass

from opgrip.cli.command import positive
from opgrip.cli.option_types import byte_count, seconds
from opgrip.cli.options import EFFORT, option, titled


@titled("limits")
@dataclass(frozen=True, slots=True)
class Limits:
    """Of a case's run, and of what is made ready before."""

    timeout: float = option(
        120.0,
        "end a case of which one run takes longer, of a sequence a call (default: %(default)g)",
        parse=seconds,
        metavar="SECONDS",
        role=EFFORT,
    )
    memory_limit: int | None = option(
        None,
        "for cases, such as 8GB (default: what the machine has left)",
        parse=byte_count,
        metavar="BYTES",
        role=EFFORT,
    )
    jobs: int | None = option(
        None,
        "cases that compile at once (default: one a processor; on an accelerator four at most)",
        parse=positive,
        metavar="N",
        only=("single cases",),
        role=EFFORT,
    )

    @property
    def compilers(self) -> int:
        """Cases that compile at once."""
        return self.jobs or len(os.sched_getaffinity(0))
