"""Which part of each of several traces is in a shard of them all."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace

from opgrip.errors import UserError
from opgrip.replay.cases.sources import source_of
from opgrip.replay.command.several.targets import Target, args_of_one
from opgrip.replay.replay_options import job_of
from opgrip.replay.workers.shards import Shard, cost_us


@dataclass(frozen=True, slots=True)
class Share:
    """What a shard has of a trace.

    Attributes
    ----------
    shard : its part of it; None where that is nothing
    trace_hash : of the whole trace, which the header of all shards says; None where it cannot be read
    """

    shard: Shard | None
    trace_hash: str | None


def deal(
    args: argparse.Namespace, targets: Sequence[Target], part: Shard, advance: Callable[[], None]
) -> dict[str, Share]:
    """The shares of a shard, by the names of traces; every trace is read, so that all shards agree on what it costs.

    Parameters
    ----------
    advance : is called after each trace
    """
    costs: list[tuple[str, int, str | None]] = []
    for target in targets:
        costs.append((target.origin.trace, *_cost(args, target)))
        advance()
    total_us, offset_us = sum(cost for _, cost, _ in costs), 0
    shares = {}
    for name, cost, trace_hash in costs:
        own = replace(part, offset_us=offset_us, total_us=total_us)
        shares[name] = Share(own if own.has_part_of(cost) else None, trace_hash)
        offset_us += cost
    return shares


def _cost(args: argparse.Namespace, target: Target) -> tuple[int, str | None]:
    """What a trace costs, and its hash; as good as nothing where it cannot be read, which one shard will say."""
    one = copy(args)
    one.shard = None
    try:
        job = job_of(args_of_one(one, target))
        loaded = job.load()
    except UserError:
        return 1, None
    trace_hash = source_of(job.trace).fingerprint(job.trace)
    return sum(cost_us(case, loaded.settings) for case in loaded.cases), trace_hash
