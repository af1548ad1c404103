"""What a signature says of a collective: its group, its root, and whether the program waits for it at once."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from opgrip.traces.analysis.ranks.operators import (
    BARRIER,
    MESSAGES,
    OTHER,
    exchange_of,
    group_of,
    is_async,
    is_functional,
    peer_of,
)
from opgrip.traces.schema.arguments import tensors
from opgrip.traces.schema.records import Signature


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective, as one rank calls it.

    Attributes
    ----------
    kind : `all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all`, `barrier`, `broadcast`, ...
    group : name of the group
    ranks : of its members in the whole program; empty where the trace does not tell
    rank : the caller's among these; None where the trace does not tell
    root : of those with one, in the whole program
    waits : whether the program waits for the end right after the call
    size_bytes : of the largest tensor list that it takes or gives
    """

    kind: str
    group: str
    ranks: tuple[int, ...]
    rank: int | None
    root: int | None
    waits: bool
    size_bytes: int


def collective_of(signature: Signature) -> Collective | None:
    """The collective that a call of a signature takes part in; None for any other operator."""
    exchange = exchange_of(signature)
    if exchange is None or exchange.kind in MESSAGES:
        return None
    group = group_of(signature)
    if group is None and not (is_functional(signature) and signature.args and type(signature.args[-1]) is str):
        return None
    group_name = str(signature.args[-1]) if group is None else group.name
    ranks = () if group is None else group.ranks
    own = ranks[group.rank] if group is not None and 0 <= group.rank < len(ranks) else None
    peer = peer_of(signature, exchange)
    root = ranks[peer] if peer is not None and 0 <= peer < len(ranks) else None
    is_watched = exchange.kind == BARRIER and exchange.form == OTHER
    waits = not is_functional(signature) and (is_watched or not is_async(signature, exchange))
    return Collective(exchange.kind, group_name, ranks, own, root, waits, _size(signature))


def _size(signature: Signature) -> int:
    sides = ([signature.outputs], *([item] for item in signature.args))
    return max(sum(prod(item.shape) * item.dtype.itemsize for item in tensors(side)) for side in sides)
