"""Execution of a rank's collectives with torch's process groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from time import perf_counter_ns
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor, distributed

from opgrip.errors import UserError, one_line
from opgrip.replay.operators.lookup import Unsupported
from opgrip.replay.sequences.ranks.rank_collectives import SUM, ReplayedCollective, as_list
from opgrip.traces.analysis.ranks.collectives import (
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

Work: TypeAlias = Any  # a `torch.distributed.Work`
# results of a collective, and the work objects to wait for until they are ready
Started: TypeAlias = tuple[list[Tensor], list[Work]]
GLOO = "gloo"
PREMUL_SUM = "PREMUL_SUM"  # reduction that multiplies by a factor before adding; traces do not record the factor
AVG = "AVG"  # reduction that gloo lacks; it is replaced by a sum, which moves as many bytes


@dataclass(frozen=True, slots=True)
class GroupMembers:
    """The members of a recorded group that take part in this replay.

    group : torch's process group of these members
    size : number of recorded members
    present : positions of these members in the recorded group
    ranks : their ranks in this replay
    on_gloo : True if the group uses the backend gloo
    """

    group: distributed.ProcessGroup
    size: int
    present: tuple[int, ...]
    ranks: tuple[int, ...]
    on_gloo: bool

    @property
    def is_whole(self) -> bool:
        """True if all recorded members take part."""
        return len(self.present) == self.size

    def rank_of(self, place: int | None) -> int:
        """Return the rank in this replay of the recorded member at position `place`; if it does not take part, that of
        the first member that does.
        """
        return self.ranks[self.present.index(place)] if place in self.present else self.ranks[0]


_gather_flat = getattr(distributed, "all_gather_single", distributed.all_gather_into_tensor)
_scatter_flat = getattr(distributed, "reduce_scatter_single", distributed.reduce_scatter_tensor)
# their older names cause warnings from torch 2.13 on


def backend_for(device: str) -> str:
    """Return torch's text that names the backends for tensors on a device and on the CPU; raise `UserError` if torch
    has no backend for the device.
    """
    kind = torch.device(device).type
    if kind == "cpu":
        return GLOO
    try:
        return f"cpu:{GLOO},{kind}:{distributed.get_default_backend_for_device(kind)}"
    except ValueError as error:
        raise UserError(f"torch has no collectives backend for {kind}", "replay on another --device") from error


def why_not(collective: ReplayedCollective, on_gloo: bool) -> str:
    """Return the reason why a group cannot run a collective; empty if no reason is known.

    This is checked before the collective runs, because gloo fails only while it runs, with messages like those for a
    rank that has ended.
    """
    reduction = collective.reduction or SUM
    if _word_of(reduction, on_gloo) not in distributed.ReduceOp.RedOpType.__members__:
        return f"torch {torch.__version__} has no reduction {reduction[:40]}"
    if not on_gloo or collective.kind == BARRIER:
        return ""
    return _gloo_refuses(_word_of(reduction, on_gloo), collective.dtype)


def make_starter(collective: ReplayedCollective, members: GroupMembers) -> Callable[..., Started]:
    """Return a function that starts a collective on the tensors that it is called with; `why_not` must have returned an
    empty string.

    members : members of the collective's group that take part
    """
    start = _STARTS[collective.kind, collective.form]
    reduction = None
    if collective.reduction:
        reduction = distributed.ReduceOp.RedOpType.__members__[_word_of(collective.reduction, members.on_gloo)]
    call = _Call(collective, members, reduction)
    return lambda *arguments: start(call, *map(as_list, arguments))


@dataclass(frozen=True, slots=True)
class _Call:
    collective: ReplayedCollective
    members: GroupMembers
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
        """Return the tensors of the members that take part, from a list with one tensor per recorded member."""
        return [parts[place] for place in self.members.present]

    def flat(self, whole: Tensor, part: Tensor) -> tuple[Tensor, Tensor]:
        """Return the section of the tensor `whole` for the members that take part, and one member's tensor `part`; both
        are flattened if members are missing.
        """
        if self.members.is_whole:
            return whole, part
        return whole.view(-1)[: whole.numel() // self.members.size * len(self.members.present)], part.view(-1)


def _word_of(reduction: str, on_gloo: bool) -> str:
    """Return the name of the reduction to run: the recorded one or, if this one cannot be replayed, the one that
    replaces it.
    """
    return SUM if reduction == PREMUL_SUM or (on_gloo and reduction == AVG) else reduction


@cache
def _gloo_refuses(reduction: str, dtype: str) -> str:
    """Return gloo's error for a reduction of a dtype, found by a trial in a group of only this process; empty if it
    works.
    """
    try:
        element = torch.empty(1, dtype=getattr(torch, dtype))
        store = distributed.HashStore()  # type: ignore[attr-defined]
        alone: Any = distributed.ProcessGroupGloo(store, 0, 1, timedelta(seconds=60))
        kind = distributed.ReduceOp.RedOpType.__members__[reduction]
        # torch passes complex numbers to gloo as pairs of real ones
        real = torch.view_as_real(element) if element.is_complex() else element
        alone.allreduce([real], distributed.ReduceOp(kind)).wait()
    except RuntimeError as error:
        return f"gloo does not take {dtype} ({one_line(error)})"
    return ""


def _start_all_reduce(call: _Call, tensors: list[Tensor]) -> Started:
    outputs = [tensor.clone() for tensor in tensors] if call.collective.makes_result else tensors
    return outputs, [distributed.all_reduce(tensor, call.reduction, **call.shared) for tensor in outputs]


def _start_broadcast(call: _Call, tensors: list[Tensor]) -> Started:
    outputs = [tensor.clone() for tensor in tensors] if call.collective.makes_result else tensors
    return outputs, [distributed.broadcast(tensor, call.root, **call.shared) for tensor in outputs]


def _start_reduce(call: _Call, tensors: list[Tensor]) -> Started:
    return [], [distributed.reduce(tensor, call.root, call.reduction, **call.shared) for tensor in tensors]


def _start_barrier(call: _Call, tensors: list[Tensor]) -> Started:
    return [], [distributed.barrier(**call.shared)]


def _start_send(call: _Call, tensors: list[Tensor]) -> Started:
    return [], [distributed.isend(tensor, call.root, call.members.group) for tensor in tensors]


def _start_recv(call: _Call, tensors: list[Tensor]) -> Started:
    return [], [distributed.irecv(tensor, call.root, call.members.group) for tensor in tensors]


def _start_all_gather(call: _Call, wholes: list[Tensor], parts: list[Tensor] | None = None) -> Started:
    if parts is None:
        # a functional collective takes only the parts
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
        flat_input, output = call.flat(whole, own)
        works.append(_scatter_flat(output, flat_input, call.reduction, **call.shared))
    return parts, works


def _start_reduce_scatter_lists(call: _Call, parts: list[Tensor], lists: list[list[Tensor]]) -> Started:
    return parts, [distributed.reduce_scatter(parts[0], call.own(lists[0]), call.reduction, **call.shared)]


def _start_all_to_all(call: _Call, first: list[Tensor], second: list[Tensor] | None = None) -> Started:
    members, splits = call.members, call.collective.splits
    source = (first if second is None else second)[0]
    rows = source.shape[0] if splits is None else sum(splits[1])
    output = source.new_empty((rows, *source.shape[1:])) if second is None else first[0]
    sent, received = source, output
    by_member: dict[str, Any] = {}
    if splits is not None:
        sent_rows, received_rows = ([item[place] for place in members.present] for item in splits)
        sent, received = source[: sum(sent_rows)], output[: sum(received_rows)]
        by_member = {"output_split_sizes": received_rows, "input_split_sizes": sent_rows}
    elif not members.is_whole:
        share = source.shape[0] // members.size * len(members.present)
        sent, received = source[:share], output[: output.shape[0] // members.size * len(members.present)]
    return [output], [distributed.all_to_all_single(received, sent, **by_member, **call.shared)]


def _start_all_to_all_lists(call: _Call, received: list[Tensor], sent: list[Tensor]) -> Started:
    return received, [distributed.all_to_all(call.own(received), call.own(sent), **call.shared)]


def _start_gather(call: _Call, lists: list[list[Tensor]], parts: list[Tensor]) -> Started:
    # the first member replaces an absent root
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


class RankExchange:
    """Starts the collectives of a pass over a step, waits for them, and records their times.

    waits : collectives that must have ended before a call, by index of the call
    synchronize : function that waits for the accelerator
    on_device : True for an accelerator: each collective is waited for at once, so that its time includes no other work
    lost : function called with the error if another rank has ended
    arrived_ns, done_ns, held_ns : start, end, and time for which this thread was blocked, by index of the collective
    """

    def __init__(
        self,
        waits: Mapping[int, Sequence[int]],
        synchronize: Callable[[], object],
        on_device: bool,
        lost: Callable[[Exception], NoReturn],
    ) -> None:
        self._waits, self._synchronize, self._on_device, self._lost = waits, synchronize, on_device, lost
        self._works: dict[int, list[Work]] = {}
        self._notes: dict[int, list[int]] = {}
        self.arrived_ns: dict[int, int] = {}
        self.done_ns: dict[int, int] = {}
        self.held_ns: dict[int, int] = {}

    def begin(self) -> None:
        """Start a new pass: wait for collectives of the last one and forget its times."""
        self.finish()
        self.arrived_ns, self.done_ns, self.held_ns = {}, {}, {}

    def before(self, place: int) -> None:
        """Wait for the collectives that must have ended before the call with the index `place`."""
        for other in self._waits.get(place, ()):
            self._wait(other)

    def start(
        self, place: int, starter: Callable[..., Started], arguments: Sequence[Any], is_async: bool
    ) -> list[torch.Tensor]:
        """Start a collective and return its results, which may not be ready yet.

        place : index of its call
        starter, arguments : function that starts it, and the tensors to call it with
        is_async : True to return before it has ended
        Raises `Unsupported` if the group's backend cannot run it; all ranks of the group raise it then.
        """
        self._synchronize()
        start = perf_counter_ns()
        try:
            results, works = starter(*arguments)
        except distributed.DistError as error:
            self._lost(error)
        except (RuntimeError, ValueError, TypeError) as error:
            raise Unsupported(one_line(error)) from error
        self.arrived_ns[place] = start
        self._works[place] = [work for work in works if work is not None]
        self.held_ns[place] = perf_counter_ns() - start
        if is_async and not self._on_device:
            self._note_ends(place)
        else:
            self._wait(place)
        return results

    def finish(self) -> None:
        """Wait for all collectives that were started in this pass."""
        for place in list(self._works):
            self._wait(place)

    def _note_ends(self, place: int) -> None:
        """Record when the collective with the index `place` ends, because the program may wait for it only later."""
        notes: list[int] = []
        # works of gloo's messages have no future: they are done when waited for
        with suppress(RuntimeError):
            for work in self._works[place]:
                work.get_future().add_done_callback(lambda _: notes.append(perf_counter_ns()))
        self._notes[place] = notes

    def _wait(self, place: int) -> None:
        works = self._works.pop(place, None)
        if works is None:
            return
        start = perf_counter_ns()
        try:
            for work in works:
                work.wait()
            self._synchronize()
        except RuntimeError as error:
            self._lost(error)
        end = perf_counter_ns()
        self.held_ns[place] += end - start
        notes = self._notes.pop(place, [])
        # a callback that runs after this thread has continued is late
        self.done_ns[place] = min(end, max(notes)) if len(notes) == len(works) > 0 else end
