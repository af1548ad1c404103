"""Starts collectives on real process groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, distributed

from opgrip.replay.operators.lookup import Unsupported
from opgrip.replay.sequences.ranks.collectives import SUM, Collective
from opgrip.traces.ranks.operators import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BARRIER,
    BROADCAST,
    FLAT,
    GATHER,
    LISTS,
    RECV,
    REDUCE,
    REDUCE_SCATTER,
    SCATTER,
    SEND,
)

Work: TypeAlias = Any
"""Of torch.distributed: something to wait for."""
Started: TypeAlias = tuple[list[Tensor], list[Work]]
"""What a collective gives, and what to wait for until it is there."""
GLOO_SUMS = frozenset({"AVG", "PREMUL_SUM"})
"""Reductions that gloo lacks, which move as much as a sum."""


@dataclass(frozen=True, slots=True)
class Members:
    """A group as it is here.

    Attributes
    ----------
    size : members that were recorded
    present : places in the recorded group of those that are there; `ranks` their ranks
    """

    group: distributed.ProcessGroup
    size: int
    present: tuple[int, ...]
    ranks: tuple[int, ...]
    on_gloo: bool

    @property
    def is_whole(self) -> bool:
        """Whether all members are there."""
        return len(self.present) == self.size

    def rank_of(self, place: int | None) -> int:
        """The rank of a recorded member; that of the first, where it is not there."""
        return self.ranks[self.present.index(place)] if place in self.present else self.ranks[0]


_gather_flat = getattr(distributed, "all_gather_single", distributed.all_gather_into_tensor)
_scatter_flat = getattr(distributed, "reduce_scatter_single", distributed.reduce_scatter_tensor)
# their names before torch 2.13 warn from there on


def make_starter(collective: Collective, members: Members) -> Callable[..., Started]:
    """What starts a collective on its tensors: takes the arguments of `tensor_arguments`.

    Raises
    ------
    Unsupported : for a reduction that torch lacks
    """
    start = _STARTS[collective.kind, collective.form]
    reduction = _reduction(collective.reduction, members) if collective.reduction else None
    call = _Call(collective, members, reduction)
    return lambda *arguments: start(call, *map(_as_list, arguments))


@dataclass(frozen=True, slots=True)
class _Call:
    collective: Collective
    members: Members
    reduction: Any

    @property
    def shared(self) -> dict[str, Any]:
        return {"group": self.members.group, "async_op": True}

    @property
    def root(self) -> int:
        return self.members.rank_of(self.collective.peer)

    @property
    def is_root(self) -> bool:
        return self.root == distributed.get_rank()

    def own(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Of a list with a tensor for each member, those of members that are there."""
        return [parts[place] for place in self.members.present]

    def flat(self, whole: Tensor, part: Tensor) -> tuple[Tensor, Tensor]:
        """As much of a tensor as the parts of the members that are there fill, and one of these parts."""
        if self.members.is_whole:
            return whole, part
        return whole.view(-1)[: whole.numel() // self.members.size * len(self.members.present)], part.view(-1)


def _as_list(argument: Any) -> list[Any]:
    return list(argument) if isinstance(argument, list | tuple) else [argument]


def _reduction(name: str, members: Members) -> Any:
    if members.on_gloo and name in GLOO_SUMS:
        name = SUM
    kinds = distributed.ReduceOp.RedOpType.__members__
    if name not in kinds or name == "PREMUL_SUM":
        raise Unsupported(f"torch {torch.__version__} has no reduction {name[:40]} here")
    return kinds[name]


def _start_all_reduce(call: _Call, given: list[Tensor]) -> Started:
    outputs = [tensor.clone() for tensor in given] if call.collective.makes_result else given
    return outputs, [distributed.all_reduce(tensor, call.reduction, **call.shared) for tensor in outputs]


def _start_broadcast(call: _Call, given: list[Tensor]) -> Started:
    outputs = [tensor.clone() for tensor in given] if call.collective.makes_result else given
    return outputs, [distributed.broadcast(tensor, call.root, **call.shared) for tensor in outputs]


def _start_reduce(call: _Call, given: list[Tensor]) -> Started:
    return [], [distributed.reduce(tensor, call.root, call.reduction, **call.shared) for tensor in given]


def _start_barrier(call: _Call, given: list[Tensor]) -> Started:
    return [], [distributed.barrier(**call.shared)]


def _start_send(call: _Call, given: list[Tensor]) -> Started:
    return [], [distributed.isend(tensor, call.root, call.members.group) for tensor in given]


def _start_recv(call: _Call, given: list[Tensor]) -> Started:
    return [], [distributed.irecv(tensor, call.root, call.members.group) for tensor in given]


def _start_all_gather(call: _Call, wholes: list[Tensor], parts: list[Tensor] | None = None) -> Started:
    if parts is None:
        # a functional one is given the parts alone
        parts, size = wholes, call.members.size
        wholes = [part.new_empty((size * part.shape[0], *part.shape[1:]) if part.dim() else (size,)) for part in parts]
    pairs = zip(wholes, parts, strict=True)
    return wholes, [_gather_flat(*call.flat(whole, part.contiguous()), **call.shared) for whole, part in pairs]


def _start_all_gather_lists(call: _Call, lists: list[list[Tensor]], parts: list[Tensor]) -> Started:
    work = distributed.all_gather(call.own(lists[0]), parts[0], **call.shared)
    return list(lists[0]), [work]


def _start_reduce_scatter(call: _Call, parts: list[Tensor], wholes: list[Tensor] | None = None) -> Started:
    if wholes is None:
        wholes = [whole.contiguous() for whole in parts]
        parts = [whole.new_empty((whole.shape[0] // call.members.size, *whole.shape[1:])) for whole in wholes]
    works = []
    for own, whole in zip(parts, wholes, strict=True):
        given, output = call.flat(whole, own)
        works.append(_scatter_flat(output, given, call.reduction, **call.shared))
    return parts, works


def _start_reduce_scatter_lists(call: _Call, parts: list[Tensor], lists: list[list[Tensor]]) -> Started:
    return parts, [distributed.reduce_scatter(parts[0], call.own(lists[0]), call.reduction, **call.shared)]


def _start_all_to_all(call: _Call, first: list[Tensor], second: list[Tensor] | None = None) -> Started:
    members, splits = call.members, call.collective.splits
    given = (first if second is None else second)[0]
    rows = given.shape[0] if splits is None else sum(splits[1])
    output = given.new_empty((rows, *given.shape[1:])) if second is None else first[0]
    sent, received = given, output
    by_member: dict[str, Any] = {}
    if splits is not None:
        sent_rows, received_rows = ([item[place] for place in members.present] for item in splits)
        sent, received = given[: sum(sent_rows)], output[: sum(received_rows)]
        by_member = {"output_split_sizes": received_rows, "input_split_sizes": sent_rows}
    elif not members.is_whole:
        share = given.shape[0] // members.size * len(members.present)
        sent, received = given[:share], output[: output.shape[0] // members.size * len(members.present)]
    return [output], [distributed.all_to_all_single(received, sent, **by_member, **call.shared)]


def _start_all_to_all_lists(call: _Call, received: list[Tensor], sent: list[Tensor]) -> Started:
    return received, [distributed.all_to_all(call.own(received), call.own(sent), **call.shared)]


def _start_gather(call: _Call, lists: list[list[Tensor]], parts: list[Tensor]) -> Started:
    # where the recorded root is not there, the first member stands in for it
    outputs = call.own(lists[0] if lists and lists[0] else _for_each(call, parts[0])) if call.is_root else None
    return [], [distributed.gather(parts[0], outputs, call.root, **call.shared)]


def _start_scatter(call: _Call, parts: list[Tensor], lists: list[list[Tensor]]) -> Started:
    inputs = call.own(lists[0] if lists and lists[0] else _for_each(call, parts[0])) if call.is_root else None
    return parts, [distributed.scatter(parts[0], inputs, call.root, **call.shared)]


def _for_each(call: _Call, part: Tensor) -> list[Tensor]:
    return [torch.empty_like(part) for _ in range(call.members.size)]


_STARTS: Mapping[tuple[str, str], Callable[..., Started]] = {
    (ALL_REDUCE, ""): _start_all_reduce,
    (BROADCAST, ""): _start_broadcast,
    (REDUCE, ""): _start_reduce,
    (BARRIER, ""): _start_barrier,
    (SEND, ""): _start_send,
    (RECV, ""): _start_recv,
    (ALL_GATHER, FLAT): _start_all_gather,
    (ALL_GATHER, LISTS): _start_all_gather_lists,
    (REDUCE_SCATTER, FLAT): _start_reduce_scatter,
    (REDUCE_SCATTER, LISTS): _start_reduce_scatter_lists,
    (ALL_TO_ALL, FLAT): _start_all_to_all,
    (ALL_TO_ALL, LISTS): _start_all_to_all_lists,
    (GATHER, LISTS): _start_gather,
    (SCATTER, LISTS): _start_scatter,
}
