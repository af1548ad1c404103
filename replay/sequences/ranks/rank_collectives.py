"""The collectives that ranks replay: their kind, group and sizes, which must not contradict each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

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

    kind : kind of collective, such as all-reduce
    reduction : torch's name of the reduction in upper case; empty if the kind has none
    peer : rank within the group of the root, or of the other side of a message; None if there is none
    form : how the tensors contain the members' parts: `flat`, `lists`, or empty
    makes_result : True if it returns new tensors, as functional collectives do, instead of writing into arguments
    is_async : True if the program continued before the collective had ended
    member_bytes : size of the part that a member sends or receives; for an all-to-all, of everything that this rank
        sends
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
    """Return True if a call is a collective or message between processes."""
    return signature.kind == OPERATOR and namespace_of(signature) is not None and signature.op not in LOCAL


def read_collective(signature: Signature) -> ReplayedCollective:
    """Return the collective or message that calls of a signature perform.

    Raises `Unsupported` for an unknown operator or group, and for sizes that contradict each other.
    """
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
    """Return those arguments of a collective that contain its tensors."""
    exchange = exchange_of(signature)
    assert exchange is not None, "`read_collective` has accepted it"
    return signature.args[: exchange.count]


def as_tensors_alone(signature: Signature) -> Signature:
    """Return the signature with only its tensors as arguments; the function that runs the collective knows
    the others.
    """
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
    """Return (rows sent to each member, rows received from each) of an all-to-all, or None if all are equal."""
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
    """Return the number of bytes of the tensors of a collective that does not divide them, such as a broadcast; their
    sizes need no check. A barrier has 0.
    """
    return 0 if collective.kind == BARRIER else _bytes(trees[0])


def _check_flat(collective: ReplayedCollective, trees: list[list[Any]], members: int) -> int:
    """Check the sizes of an all-gather or reduce-scatter on single tensors, and return the number of bytes of one
    member's part.
    """
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
    """Check the sizes of lists with one tensor for each member, and return the number of bytes of one member's part."""
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
    """Check the sizes of an all-to-all, and return the number of bytes that this rank sends."""
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
