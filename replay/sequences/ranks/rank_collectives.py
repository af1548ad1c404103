"""The collectives that ranks replay: their kind, group and sizes, and their execution with torch's process groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from math import prod
from time import perf_counter_ns
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor, distributed

from opgrip.errors import UserError, one_line
from opgrip.replay.operators.lookup import Unsupported
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
    ExchangeOp,
    exchange_of,
    group_of,
    is_async,
    is_functional,
    name_of,
    namespace_of,
    peer_of,
)
from opgrip.traces.schema.arguments import GroupSpec, ReductionSpec, TensorSpec, leaves, tensors
from opgrip.traces.schema.records import OPERATOR, Signature
from opgrip.traces.schema.tensor_specs import contiguous

NAMESPACES = ("c10d", "_c10d_functional")  # namespaces of the operators that ranks run
# operators that pass on the result of a collective; the first one also waits for it
LOCAL = frozenset({"_c10d_functional.wait_tensor.default", "_c10d_functional._wrap_tensor_autograd.default"})
MOST_MEMBERS = 1 << 20
SUM = "SUM"
UNKNOWN_GROUP = "the trace does not contain the ranks of its group"


@dataclass(frozen=True, slots=True)
class ReplayedCollective:
    """The collective or message that calls of a signature perform.

    reduction : torch's name of the reduction in upper case; empty if the kind has none
    peer : position of the root, or of the other side of a message, in the group; None if there is none
    form : `flat` if one tensor contains the parts of all members, `lists` if each part is a tensor
    splits : rows sent to each member and rows received from each, for an uneven all-to-all; else None
    """

    kind: str
    group: GroupSpec
    reduction: str
    peer: int | None
    form: str
    makes_result: bool
    is_async: bool
    member_bytes: int
    dtype: str
    splits: tuple[tuple[int, ...], tuple[int, ...]] | None = None


def is_exchange(signature: Signature) -> bool:
    return signature.kind == OPERATOR and namespace_of(signature) is not None and signature.op not in LOCAL


def read_collective(signature: Signature) -> ReplayedCollective:
    exchange, name = exchange_of(signature), name_of(signature)
    is_known = signature.op in (f"{namespace}.{name}.default" for namespace in NAMESPACES)
    if exchange is None or not is_known or (exchange.kind, exchange.form) not in _CHECKS:
        raise Unsupported(f"{signature.op} is not a collective that ranks can replay")
    group = group_of(signature)
    if group is None:
        raise Unsupported(UNKNOWN_GROUP)
    if not (0 <= group.rank < len(group.ranks) <= MOST_MEMBERS and len(set(group.ranks)) == len(group.ranks)):
        raise Unsupported("the collective's group repeats a rank, or lacks the rank of this process")
    if signature.kwargs or len(signature.args) < exchange.count:
        raise Unsupported("opgrip does not know the arguments of this collective")
    peer = peer_of(signature, exchange)
    if peer is None and exchange.has_peer:
        raise Unsupported("the trace does not contain the collective's root")
    if peer is not None and not 0 <= peer < len(group.ranks):
        raise Unsupported("the collective's root is not in its group")
    collective = ReplayedCollective(
        kind=exchange.kind,
        group=group,
        reduction=_reduction(signature) if exchange.kind in (ALL_REDUCE, REDUCE_SCATTER, REDUCE) else "",
        peer=peer,
        form=exchange.form,
        makes_result=is_functional(signature) and not name.endswith("_"),
        is_async=is_async(signature, exchange),
        member_bytes=0,
        dtype="",
        splits=_splits(signature, exchange),
    )
    return _with_sizes(collective, signature)


def tensor_arguments(signature: Signature) -> tuple[Any, ...]:
    exchange = exchange_of(signature)
    assert exchange is not None, "`read_collective` has accepted it"
    return signature.args[: exchange.count]


def as_tensors_alone(signature: Signature) -> Signature:
    results = [leaf for leaf in leaves(signature.outputs) if isinstance(leaf, TensorSpec)]
    return replace(signature, args=tensor_arguments(signature), kwargs={}, outputs=results)


def _reduction(signature: Signature) -> str:
    for leaf in signature.args:
        if isinstance(leaf, ReductionSpec):
            return leaf.name.upper()
        if isinstance(leaf, str):
            return leaf.upper()
    # some versions of torch do not record the reduction; a sum moves as many bytes
    return SUM


def _splits(signature: Signature, exchange: ExchangeOp) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    if exchange.kind != ALL_TO_ALL or exchange.form != FLAT:
        return None
    lists = [leaf for leaf in signature.args[exchange.count :] if isinstance(leaf, list)]
    if len(lists) < 2 or not (lists[0] or lists[1]):
        return None
    received, sent = (tuple(item) for item in lists[:2])
    if any(type(count) is not int or count < 0 for count in (*received, *sent)):
        raise Unsupported("the collective's splits are not numbers")
    return sent, received


def _with_sizes(collective: ReplayedCollective, signature: Signature) -> ReplayedCollective:
    trees = tensor_arguments(signature)
    specs = list(tensors(trees))
    if not specs:
        raise Unsupported("the collective has no tensors")
    for spec in specs:
        if spec.stride is None or spec.cls is not None:
            raise Unsupported("sparse tensors and tensor subclasses are not supported in collectives")
    if len({spec.dtype for spec in specs}) != 1:
        raise Unsupported("the collective's tensors differ in dtype")
    check = _CHECKS[collective.kind, collective.form]
    member_bytes = check(collective, [as_list(tree) for tree in trees], len(collective.group.ranks))
    return replace(collective, member_bytes=member_bytes, dtype=str(specs[0].dtype).removeprefix("torch."))


def as_list(tree: Any) -> list[Any]:
    return list(tree) if isinstance(tree, list | tuple) else [tree]


def _bytes(specs: Sequence[TensorSpec]) -> int:
    return sum(prod(spec.shape) * spec.dtype.itemsize for spec in specs)


def _elements(spec: TensorSpec) -> int:
    return prod(spec.shape)


def _disagree() -> Unsupported:
    return Unsupported("the sizes of the collective's tensors do not match")


def _check_whole(collective: ReplayedCollective, trees: list[list[Any]], members: int) -> int:
    return 0 if collective.kind == BARRIER else _bytes(trees[0])


def _check_flat(collective: ReplayedCollective, trees: list[list[Any]], members: int) -> int:
    is_gather = collective.kind == ALL_GATHER
    if collective.makes_result:
        sizes = sum(map(_elements, trees[0]))
        if not is_gather and any(not spec.shape or spec.shape[0] % members for spec in trees[0]):
            raise _disagree()
        itemsize = trees[0][0].dtype.itemsize
        return int(sizes * itemsize if is_gather else sizes * itemsize // members)
    wholes, parts = trees if is_gather else trees[::-1]
    pairs = zip(wholes, parts, strict=False)
    if len(wholes) != len(parts) or any(_elements(whole) != members * _elements(part) for whole, part in pairs):
        raise _disagree()
    if any(not _is_dense(spec) for spec in wholes):
        raise Unsupported("the collective's tensors are not contiguous")
    return _bytes(parts)


def _check_lists(collective: ReplayedCollective, trees: list[list[Any]], members: int) -> int:
    lists, parts = trees if collective.kind in (ALL_GATHER, GATHER) else trees[::-1]
    # only the root passes a list to gather or scatter
    lists = [item for item in lists if item]
    if len(parts) != 1 or any(len(item) != members for item in lists) or len(lists) > 1:
        raise _disagree()
    if any(_elements(spec) != _elements(parts[0]) for item in lists for spec in item):
        raise Unsupported("the tensors of the ranks differ in size")
    if not lists and collective.kind not in (GATHER, SCATTER):
        raise _disagree()
    return _bytes(parts)


def _check_exchange(collective: ReplayedCollective, trees: list[list[Any]], members: int) -> int:
    if collective.form == LISTS:
        received, sent = trees
        if len(received) != members or len(sent) != members:
            raise _disagree()
        return _bytes(sent)
    sent_spec = trees[-1][0]
    rows = sent_spec.shape[0] if sent_spec.shape else 0
    if collective.splits is None:
        if rows % members or (len(trees) == 2 and _elements(trees[0][0]) != _elements(sent_spec)):
            raise _disagree()
    else:
        to_each, from_each = collective.splits
        received_rows = trees[0][0].shape[0] if len(trees) == 2 and trees[0][0].shape else sum(from_each)
        if {len(to_each), len(from_each)} != {members} or (sum(to_each), sum(from_each)) != (rows, received_rows):
            raise _disagree()
    if not all(_is_dense(spec) for tree in trees for spec in tree):
        raise Unsupported("the collective's tensors are not contiguous")
    return _bytes([sent_spec])


def _is_dense(spec: TensorSpec) -> bool:
    assert spec.stride is not None, "`_with_sizes` refuses sparse tensors"
    steps = zip(spec.shape, spec.stride, contiguous(spec.shape), strict=True)
    return all(size == 1 or stride == expected for size, stride, expected in steps)


_CHECKS: Mapping[tuple[str, str], Callable[[ReplayedCollective, list[list[Any]], int], int]] = {
    **{(kind, ""): _check_whole for kind in (ALL_REDUCE, BROADCAST, REDUCE, SEND, RECV, BARRIER)},
    **{(kind, FLAT): _check_flat for kind in (ALL_GATHER, REDUCE_SCATTER)},
    **{(kind, LISTS): _check_lists for kind in (ALL_GATHER, REDUCE_SCATTER, GATHER, SCATTER)},
    **{(ALL_TO_ALL, form): _check_exchange for form in (FLAT, LISTS)},
}


Work: TypeAlias = Any  # a `torch.distributed.Work`
# results of a collective, and the work objects to wait for until they are ready
Started: TypeAlias = tuple[list[Tensor], list[Work]]
GLOO = "gloo"
PREMUL_SUM = "PREMUL_SUM"  # reduction that multiplies by a factor before adding; traces do not record the factor
AVG = "AVG"  # reduction that gloo lacks; it is replaced by a sum, which moves as many bytes


@dataclass(frozen=True, slots=True)
class GroupMembers:
    """The members of a recorded group that take part in this replay.

    size : number of recorded members
    present : positions of these members in the recorded group
    ranks : their ranks in this replay
    """

    group: distributed.ProcessGroup
    size: int
    present: tuple[int, ...]
    ranks: tuple[int, ...]
    on_gloo: bool

    @property
    def is_whole(self) -> bool:
        return len(self.present) == self.size

    def rank_of(self, place: int | None) -> int:
        return self.ranks[self.present.index(place)] if place in self.present else self.ranks[0]


# older names of these cause warnings from torch 2.13 on
_gather_flat = getattr(distributed, "all_gather_single", distributed.all_gather_into_tensor)
_scatter_flat = getattr(distributed, "reduce_scatter_single", distributed.reduce_scatter_tensor)


def backend_for(device: str) -> str:
    kind = torch.device(device).type
    if kind == "cpu":
        return GLOO
    try:
        return f"cpu:{GLOO},{kind}:{distributed.get_default_backend_for_device(kind)}"
    except ValueError as error:
        raise UserError(f"torch has no collectives backend for {kind}", "replay on another --device") from error


def why_not(collective: ReplayedCollective, on_gloo: bool) -> str:
    """Return the reason why a group cannot run a collective; empty if no reason is known."""
    reduction = collective.reduction or SUM
    if _word_of(reduction, on_gloo) not in distributed.ReduceOp.RedOpType.__members__:
        return f"torch {torch.__version__} has no reduction {reduction[:40]}"
    if not on_gloo or collective.kind == BARRIER:
        return ""
    return _gloo_refuses(_word_of(reduction, on_gloo), collective.dtype)


def make_starter(collective: ReplayedCollective, members: GroupMembers) -> Callable[..., Started]:
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
        return [parts[index] for index in self.members.present]

    def flat(self, whole: Tensor, part: Tensor) -> tuple[Tensor, Tensor]:
        if self.members.is_whole:
            return whole, part
        return whole.view(-1)[: whole.numel() // self.members.size * len(self.members.present)], part.view(-1)


def _word_of(reduction: str, on_gloo: bool) -> str:
    return SUM if reduction == PREMUL_SUM or (on_gloo and reduction == AVG) else reduction


@cache
def _gloo_refuses(reduction: str, dtype: str) -> str:
    # tried in a group of only this process
    try:
        element = torch.empty(1, dtype=getattr(torch, dtype))
        store = distributed.HashStore()  # type: ignore[attr-defined]
        alone: Any = distributed.ProcessGroupGloo(store, 0, 1, timedelta(seconds=60))
        kind = distributed.ReduceOp.RedOpType.__members__[reduction]
        # torch passes complex numbers to gloo as pairs of real ones
        real = torch.view_as_real(element) if element.is_complex() else element
        alone.allreduce([real], distributed.ReduceOp(kind)).wait()
    except RuntimeError as error:
        return f"gloo does not support {dtype} ({one_line(error)})"
    return ""


def _start_all_reduce(call: _Call, tensors: list[Tensor]) -> Started:
    outputs = [tensor.clone() for tensor in tensors] if call.collective.makes_result else tensors
    return outputs, [distributed.all_reduce(tensor, call.reduction, **call.shared) for tensor in outputs]


def _start_broadcast(call: _Call, tensors: list[Tensor]) -> Started:
    outputs = [tensor.clone() for tensor in tensors] if call.collective.makes_result else tensors
    return outputs, [distributed.broadcast(tensor, call.root, **call.shared) for tensor in outputs]


def _start_reduce(call: _Call, tensors: list[Tensor]) -> Started:
    return [], [distributed.reduce(tensor, call.root, call.reduction, **call.shared) for tensor in tensors]


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
        sent_rows, received_rows = ([item[index] for index in members.present] for item in splits)
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
    (BARRIER, ""): lambda call, tensors: ([], [distributed.barrier(**call.shared)]),
    (SEND, ""): lambda call, tensors: ([], [distributed.isend(one, call.root, call.members.group) for one in tensors]),
    (RECV, ""): lambda call, tensors: ([], [distributed.irecv(one, call.root, call.members.group) for one in tensors]),
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
    """Starts the collectives of one run of a step, waits for them, and records their times.

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
        self.finish()
        self.arrived_ns, self.done_ns, self.held_ns = {}, {}, {}

    def before(self, place: int) -> None:
        """Wait for the collectives that must have ended before the call with the index `place`."""
        for other in self._waits.get(place, ()):
            self._wait(other)

    def start(
        self, place: int, starter: Callable[..., Started], arguments: Sequence[Any], is_async: bool
    ) -> list[torch.Tensor]:
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
        for index in list(self._works):
            self._wait(index)

    def _note_ends(self, index: int) -> None:
        notes: list[int] = []
        # works of gloo's messages have no future: they are done when waited for
        with suppress(RuntimeError):
            for work in self._works[index]:
                work.get_future().add_done_callback(lambda _: notes.append(perf_counter_ns()))
        self._notes[index] = notes

    def _wait(self, index: int) -> None:
        works = self._works.pop(index, None)
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
        self.held_ns[index] += end - start
        notes = self._notes.pop(index, [])
        # a callback that runs after this thread has continued is late
        self.done_ns[index] = min(end, max(notes)) if len(notes) == len(works) > 0 else end
