"""How ranks that a launcher started replay a step together."""

from __future__ import annotations

from dataclasses import dataclass

from opgrip.cli.option_types import seconds
from opgrip.cli.options import EFFORT, RUN, option, titled

COLLECTIVES = "collectives"


@titled("a sequence of several ranks, which torchrun starts")
@dataclass(frozen=True, slots=True)
class RankOptions:
    """What the ranks run, and how long they wait for each other."""

    only: str | None = option(
        None,
        "run the collectives alone, in their order, without what is computed between them",
        choices=(COLLECTIVES,),
        only=("ranks",),
        role=RUN,
    )
    scale_ranks: bool = option(
        False,
        "with fewer ranks than were recorded: run each group among its members that are there, each of which gives as "
        "much as it did; without it, collectives of such groups are left out, and counted",
        only=("ranks",),
        role=RUN,
    )
    collective_timeout: float = option(
        60.0,
        "end all ranks where one is not heard of for so long (default: %(default)g)",
        parse=seconds,
        metavar="SECONDS",
        only=("ranks",),
        role=EFFORT,
    )
