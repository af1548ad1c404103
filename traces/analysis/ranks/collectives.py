"""Facts about the signatures of collectives and messages between processes, and their bandwidth as in nccl-tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

from opgrip.traces.schema.arguments import GroupSpec, leaves, tensors
from opgrip.traces.schema.records import Signature

ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, ALL_TO_ALL = "all_reduce", "reduce_scatter", "all_gather", "all_to_all"
BROADCAST, REDUCE, GATHER, SCATTER = "broadcast", "reduce", "gather", "scatter"
SEND, RECV, BARRIER = "send", "recv", "barrier"
FROM_ROOT = (BROADCAST, SCATTER)  # collectives in which the other members wait only for the root
TO_ROOT = (REDUCE, GATHER)  # collectives in which only the root waits
MESSAGES = (SEND, RECV)  # messages between two processes instead of collectives of a group

# Layouts of the members' parts: one tensor with all parts in order; a list with one tensor per member; a layout that
# cannot be replayed. An empty string means that there are no parts.
FLAT, LISTS, OTHER = "flat", "lists", "other"
WAIT = "wait_tensor"  # name of the functional operator that waits for a result


@dataclass(frozen=True, slots=True)
class ExchangeOp:
    """Description of an operator that exchanges tensors between processes.

    kind : collective, such as `all_reduce`, or kind of message
    count : number of leading arguments that hold tensors
    has_peer : True if an argument is the rank of the root, or of the sender or receiver of a message
    """

    kind: str
    count: int
    form: str = ""
    has_peer: bool = False


_C10D = {
    "allreduce_": ExchangeOp(ALL_REDUCE, 1),
    "allreduce_coalesced_": ExchangeOp(ALL_REDUCE, 1),
    "allgather_": ExchangeOp(ALL_GATHER, 2, LISTS),
    "allgather_coalesced_": ExchangeOp(ALL_GATHER, 2, OTHER),
    "_allgather_base_": ExchangeOp(ALL_GATHER, 2, FLAT),
    "allgather_into_tensor_coalesced_": ExchangeOp(ALL_GATHER, 2, FLAT),
    "reduce_scatter_": ExchangeOp(REDUCE_SCATTER, 2, LISTS),
    "_reduce_scatter_base_": ExchangeOp(REDUCE_SCATTER, 2, FLAT),
    "reduce_scatter_tensor_coalesced_": ExchangeOp(REDUCE_SCATTER, 2, FLAT),
    "alltoall_": ExchangeOp(ALL_TO_ALL, 2, LISTS),
    "alltoall_base_": ExchangeOp(ALL_TO_ALL, 2, FLAT),
    "broadcast_": ExchangeOp(BROADCAST, 1, has_peer=True),
    "reduce_": ExchangeOp(REDUCE, 1, has_peer=True),
    "gather_": ExchangeOp(GATHER, 2, LISTS, has_peer=True),
    "scatter_": ExchangeOp(SCATTER, 2, LISTS, has_peer=True),
    "send": ExchangeOp(SEND, 1, has_peer=True),
    "recv_": ExchangeOp(RECV, 1, has_peer=True),
    "barrier": ExchangeOp(BARRIER, 1),
    "monitored_barrier_": ExchangeOp(BARRIER, 1, OTHER),
}
_FUNCTIONAL = {
    **dict.fromkeys(("all_reduce", "all_reduce_"), ExchangeOp(ALL_REDUCE, 1)),
    **dict.fromkeys(("all_reduce_coalesced", "all_reduce_coalesced_"), ExchangeOp(ALL_REDUCE, 1)),
    **dict.fromkeys(("all_gather_into_tensor", "all_gather_into_tensor_coalesced"), ExchangeOp(ALL_GATHER, 1, FLAT)),
    "all_gather_into_tensor_out": ExchangeOp(ALL_GATHER, 1, OTHER),
    **dict.fromkeys(("reduce_scatter_tensor", "reduce_scatter_tensor_coalesced"), ExchangeOp(REDUCE_SCATTER, 1, FLAT)),
    "reduce_scatter_tensor_out": ExchangeOp(REDUCE_SCATTER, 1, OTHER),
    "all_to_all_single": ExchangeOp(ALL_TO_ALL, 1, FLAT),
    **dict.fromkeys(("broadcast", "broadcast_"), ExchangeOp(BROADCAST, 1, has_peer=True)),
}
# facts about operators, by namespace and name
_EXCHANGES: Mapping[str, Mapping[str, ExchangeOp]] = {
    "c10d": _C10D,
    "_c10d_functional": _FUNCTIONAL,
    "_c10d_functional_autograd": _FUNCTIONAL,
    # name in older versions of torch
    "c10d_functional": _FUNCTIONAL,
}


def namespace_of(signature: Signature) -> str | None:
    namespace = signature.op.partition(".")[0]
    return namespace if namespace in _EXCHANGES else None


def name_of(signature: Signature) -> str:
    return signature.op.split(".")[1] if "." in signature.op else ""


def exchange_of(signature: Signature) -> ExchangeOp | None:
    namespace = namespace_of(signature)
    return None if namespace is None else _EXCHANGES[namespace].get(name_of(signature))


def is_functional(signature: Signature) -> bool:
    return namespace_of(signature) != "c10d"


def is_wait(signature: Signature) -> bool:
    return namespace_of(signature) is not None and name_of(signature) == WAIT


def group_of(signature: Signature) -> GroupSpec | None:
    return next((leaf for leaf in leaves([signature.args, signature.kwargs]) if isinstance(leaf, GroupSpec)), None)


def peer_of(signature: Signature, exchange: ExchangeOp) -> int | None:
    """Return the rank, within its group, of a collective's root or of a message's other process."""
    if not exchange.has_peer:
        return None
    return next((leaf for leaf in signature.args[exchange.count :] if type(leaf) is int), None)


def is_async(signature: Signature, exchange: ExchangeOp) -> bool:
    others = (*signature.args[exchange.count :], *signature.kwargs.values())
    return next((leaf for leaf in others if type(leaf) is bool), True)


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective as one rank called it.

    ranks : global ranks of the group's members; empty if unknown
    rank, root : global rank of the caller and of the root, or None
    """

    kind: str
    group: str
    ranks: tuple[int, ...]
    rank: int | None
    root: int | None
    waits: bool
    size_bytes: int


def collective_of(signature: Signature) -> Collective | None:
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
    sides = ([signature.outputs], *([item] for item in signature.args))
    size = max(sum(prod(item.shape) * item.dtype.itemsize for item in tensors(side)) for side in sides)
    return Collective(exchange.kind, group_name, ranks, own, root, waits, size)


SEND_RECV = "send_recv"  # name under which a table of collectives shows both sides of a message


def _others(ranks: int) -> float:
    return (ranks - 1) / ranks


_FACTORS: dict[str, Callable[[int], float]] = {
    ALL_REDUCE: lambda ranks: 2 * _others(ranks),
    REDUCE_SCATTER: _others,
    ALL_GATHER: _others,
    ALL_TO_ALL: _others,
    GATHER: _others,
    SCATTER: _others,
    BROADCAST: lambda ranks: 1.0,
    REDUCE: lambda ranks: 1.0,
    SEND_RECV: lambda ranks: 1.0,
}
# collectives whose size is the sum of all members' parts
WHOLE = frozenset({REDUCE_SCATTER, ALL_GATHER, ALL_TO_ALL, GATHER, SCATTER})


def bus_factor(kind: str, ranks: int) -> float:
    """Return bus bandwidth divided by algorithm bandwidth; source: NVIDIA nccl-tests, doc/PERFORMANCE.md."""
    factor = _FACTORS.get(SEND_RECV if kind in MESSAGES else kind)
    return 0.0 if factor is None else factor(ranks)


def size_of(kind: str, member_bytes: int, ranks: int) -> int:
    """Return the size in bytes that is divided by the time of a collective to get its algorithm bandwidth.

    member_bytes : size of each member's part; for an all-to-all, of everything that this rank sends
    """
    return member_bytes * ranks if kind in WHOLE - {ALL_TO_ALL} else member_bytes
