"""Options, launcher settings and result columns of step replay, for one process and for several ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from opgrip.cli.option_types import seconds
from opgrip.cli.options import EFFORT, IDENTITY, RUN, option, titled
from opgrip.replay.results.columns import Columns, column


@titled("execution")
@dataclass(frozen=True, slots=True)
class SequenceOptions:
    """Option that selects step replay."""

    sequence: bool = option(
        False,
        "replay the whole step: all calls in their recorded order, each on the results of earlier calls",
        only=("traces", "one trace"),
        role=IDENTITY,
        column="method",
        common=True,
    )


@dataclass(frozen=True, slots=True)
class RankLaunch:
    """Settings of one of the processes that a launcher started together.

    local_rank : index of the process, and of its accelerator, on its machine
    address, port : address of the store through which the ranks find each other
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    address: str
    port: int


def launch_of(environment: Mapping[str, str] = os.environ) -> RankLaunch | None:
    """Return the launcher's settings from environment variables, or None without a launcher."""
    names = ("RANK", "WORLD_SIZE", "MASTER_PORT")
    numbers = [environment.get(name, "") for name in names]
    address = environment.get("MASTER_ADDR")
    if not address or not all(text.isdecimal() for text in numbers):
        return None
    rank, world_size, port = map(int, numbers)
    local, on_machine = environment.get("LOCAL_RANK", ""), environment.get("LOCAL_WORLD_SIZE", "")
    local_rank = int(local) if local.isdecimal() else rank
    local_world_size = int(on_machine) if on_machine.isdecimal() and int(on_machine) else world_size
    return RankLaunch(rank, world_size, local_rank, local_world_size, address, port)


COLLECTIVES = "collectives"


@titled("replay of several ranks, with --sequence under torchrun")
@dataclass(frozen=True, slots=True)
class RankOptions:
    """Options for what the ranks run and how long they wait for each other."""

    only: str | None = option(
        None,
        "run only the collectives, without the computation between them",
        choices=(COLLECTIVES,),
        only=("ranks",),
        role=RUN,
    )
    scale_ranks: bool = option(
        False,
        "with fewer ranks than recorded: run each collective among the available ranks of its group, "
        "each with its recorded amount of data (default: leave out and count such collectives)",
        only=("ranks",),
        role=RUN,
    )
    collective_timeout: float = option(
        60.0,
        "stop all ranks if one is not heard from for this time (default: %(default)g)",
        parse=seconds,
        metavar="SECONDS",
        only=("ranks",),
        role=EFFORT,
    )


@dataclass(frozen=True, slots=True)
class SequenceColumns(Columns):
    """Columns for how the calls of a row ran, if any could not use the results of earlier calls, and for their host
    time.
    """

    substituted: int | None = column(
        "number of calls, out of `count`, that ran on newly drawn arguments; empty if 0", heading="substituted"
    )
    not_run: int | None = column("of `count`, the calls that did not run at all; empty for none", heading="not run")
    redrawn: int | None = column(
        "number of calls, out of `count`, with values drawn again in their own memory; empty if 0"
    )
    replayed_host_us: float | None = column(
        "median time of the calls on the host, where `median_us` is by the device's clock",
        "us",
        heading="replayed host us",
    )


@dataclass(frozen=True, slots=True)
class RankColumns(Columns):
    """Columns for the rank of a row's calls and, for collectives, the data that they moved and how long they waited."""

    rank: int | None = column("of several, the rank whose calls these are", heading="rank")
    group_ranks: str | None = column("of a collective, the ranks that took part, such as `0,1`")
    exchanged_bytes: int | None = column("of a collective, the size that its bandwidths refer to", "bytes")
    exchange_us: float | None = column(
        "of a collective, median time from the last rank's coming to the last's end", "us"
    )
    wait_us: float | None = column("median time that the rank had waited for the last one by then", "us")
    held_us: float | None = column("median time that the collective held the rank's thread up", "us")
    algorithm_gb_per_s: float | None = column("`exchanged_bytes` over `exchange_us`", "GB/s")
    bus_gb_per_s: float | None = column("that, times the factor that nccl-tests define for its kind and ranks", "GB/s")
