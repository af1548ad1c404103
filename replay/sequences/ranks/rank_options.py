"""How ranks replay a step together, and which rank this process is for its launcher."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from opgrip.cli.option_types import seconds
from opgrip.cli.options import EFFORT, RUN, option, titled


@dataclass(frozen=True, slots=True)
class Launch:
    """A process among those that were launched together.

    Attributes
    ----------
    rank : its number, below `world_size`
    local_rank : its number on its machine, which its accelerator has too
    local_world_size : how many there are on its machine
    address, port : of the store that they meet at
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    address: str
    port: int


def launch_of(environment: Mapping[str, str] = os.environ) -> Launch | None:
    """What a launcher says in the environment; None where there is none."""
    names = ("RANK", "WORLD_SIZE", "MASTER_PORT")
    numbers = [environment.get(name, "") for name in names]
    address = environment.get("MASTER_ADDR")
    if not address or not all(text.isdecimal() for text in numbers):
        return None
    rank, world_size, port = map(int, numbers)
    local, beside = environment.get("LOCAL_RANK", ""), environment.get("LOCAL_WORLD_SIZE", "")
    local_rank = int(local) if local.isdecimal() else rank
    local_world_size = int(beside) if beside.isdecimal() and int(beside) else world_size
    return Launch(rank, world_size, local_rank, local_world_size, address, port)


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
