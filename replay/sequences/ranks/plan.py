"""The plan of a step that several ranks replay: which calls each rank runs, and which of their collectives match."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from opgrip.errors import UserError
from opgrip.replay.cases.flow import ProgramFlow
from opgrip.replay.sequences.ranks.rank_collectives import LOCAL, MOST_MEMBERS, ReplayedCollective, is_exchange
from opgrip.traces import Trace
from opgrip.traces.analysis.ranks.collectives import ALL_TO_ALL, MESSAGES, SEND, SEND_RECV, size_of
from opgrip.traces.codec.call_blocks import CallBlock
from opgrip.traces.io.reader import read_header
from opgrip.traces.schema.records import NO_STORAGE
from opgrip.traces.table.call_source import CallSource
from opgrip.traces.table.call_table import all_storages, calls_table

HINT = "merge the traces of all ranks: opgrip trace merge step.rank*.jsonl -o step.jsonl"


def recorded_ranks(trace: Trace) -> dict[int, int | None]:
    """Return the ranks of a trace's program; in a merged trace, each with the number of its process."""
    headers = trace.header.get("processes")
    ranks: dict[int, int | None] = {}
    for process, header in enumerate(headers if isinstance(headers, list) else []):
        rank = header.get("rank") if isinstance(header, dict) else None
        if type(rank) is int:
            # processes that a rank forked come after it in the trace
            ranks.setdefault(rank, process)
    world_size = trace.header.get("world_size")
    if not ranks and type(trace.header.get("rank")) is int and type(world_size) is int:
        ranks = dict.fromkeys(range(min(world_size, MOST_MEMBERS)))
    if not ranks:
        raise UserError("the trace is of one process, not of several ranks", HINT)
    return ranks


def own_file(paths: Sequence[Path], rank: int, unbounded: bool = False) -> Path:
    for path in paths:
        if read_header(path, unbounded).fields.get("rank") == rank:
            return path
    raise UserError(f"rank {rank} is missing in the {len(paths)} traces", "name the traces of all ranks")


def part_of(trace: Trace, rank: int, world_size: int) -> Trace:
    """Return a trace with only the calls of one of the `world_size` ranks that were started."""
    ranks = recorded_ranks(trace)
    if world_size > len(ranks):
        few = f"{len(ranks)} ranks are in the trace, and {world_size} were started"
        raise UserError(few, f"start at most {len(ranks)}: --nproc-per-node {len(ranks)}")
    absent = sorted(set(range(world_size)) - set(ranks))
    if absent or trace.header.get("rank", rank) != rank:
        raise UserError(f"rank {absent[0] if absent else rank} is not in the trace", HINT)
    if ranks[rank] is None:
        return trace
    source = _source_of(trace, ranks[rank])
    calls = calls_table(source, trace.names)
    present = set(calls["signature"].tolist())
    return replace(
        trace,
        calls=calls,
        # fields that are not set here would be built from all ranks
        storages=all_storages(source),
        unfinished=[],
        source=source,
        signatures=[signature for signature in trace.signatures if signature.number in present],
        header={**trace.header, "rank": rank},
    )


def _source_of(trace: Trace, process: int | None) -> CallSource:
    threads = {number for number, thread in trace.threads.items() if thread.process == process}

    def own_blocks() -> Iterator[CallBlock]:
        return (block for block in trace.source if block.thread in threads)

    source = CallSource(own_blocks)
    for block in own_blocks():
        source.add(block)
    return source


def exchanges_alone(trace: Trace) -> Trace:
    """Return a trace with only the collectives of a rank, and operators such as `wait_tensor` on their results."""
    numbers = {item.number for item in trace.signatures if is_exchange(item) or item.op in LOCAL}
    calls = trace.calls[trace.calls["signature"].isin(numbers)]
    signatures = [item for item in trace.signatures if item.number in numbers]
    return replace(trace, calls=calls.reset_index(drop=True), signatures=signatures)


def wait_points(
    flow: ProgramFlow, places: Sequence[int], run_places: Sequence[int] | None = None
) -> dict[int, list[int]]:
    """Return, by index of a call, the indices of the collectives that must have ended before the call.

    places : indices of the collectives
    run_places : indices of the calls that run, None for all; the returned indices then count only these calls
    """
    new_places = {
        index: number for number, index in enumerate(range(len(flow.calls)) if run_places is None else run_places)
    }
    collectives, due = set(places), list[int]()
    pending: dict[int, set[int]] = {}
    before: dict[int, list[int]] = {}
    for index, call in enumerate(flow.calls):
        touched = {number for number in (*call.inputs, *call.outputs) if number != NO_STORAGE}
        awaited = set[int]().union(*(pending.get(number, ()) for number in touched))
        if awaited:
            due += sorted(awaited)
            pending = {number: rest for number, others in pending.items() if (rest := others - awaited)}
        if index in collectives:
            for number in touched:
                pending.setdefault(number, set()).add(index)
        if due and index in new_places:
            before[new_places[index]] = [new_places[other] for other in due]
            due = []
    return before


GroupKey: TypeAlias = tuple[tuple[int, ...], str]  # recorded ranks of a group, and its name
# key of collectives that run in order: all of a group, or all messages from one member to another
_Line: TypeAlias = tuple[GroupKey, int, int]


@dataclass(frozen=True, slots=True)
class Offer:
    """Description of a collective call in one rank, to be compared with the calls of the other ranks.

    kind, reduction, peer, member_bytes, dtype, splits : as in `ReplayedCollective`
    rank : position of this rank in the group
    """

    kind: str
    name: str
    ranks: tuple[int, ...]
    rank: int
    reduction: str
    peer: int | None
    member_bytes: int
    dtype: str
    splits: tuple[tuple[int, ...], tuple[int, ...]] | None
    reason: str = ""

    @classmethod
    def from_plain(cls, fields: Sequence[Any]) -> Offer:
        kind, name, ranks, rank, reduction, peer, member_bytes, dtype, splits, reason = fields
        both = None if splits is None else (tuple(splits[0]), tuple(splits[1]))
        return cls(kind, name, tuple(ranks), rank, reduction, peer, member_bytes, dtype, both, reason)

    @property
    def group(self) -> GroupKey:
        return self.ranks, self.name

    @property
    def line(self) -> _Line:
        if self.kind not in MESSAGES:
            return self.group, -1, -1
        assert self.peer is not None, "`read_collective` refuses a message without a peer"
        sides = (self.rank, self.peer) if self.kind == SEND else (self.peer, self.rank)
        return self.group, *sides


def offer_of(collective: ReplayedCollective | str, reason: str = "") -> Offer:
    if isinstance(collective, str):
        return Offer("", "", (), 0, "", None, 0, "", None, collective)
    group = collective.group
    return Offer(
        kind=collective.kind,
        name=group.name,
        ranks=group.ranks,
        rank=group.rank,
        reduction=collective.reduction,
        peer=collective.peer,
        member_bytes=collective.member_bytes,
        dtype=collective.dtype,
        splits=collective.splits,
        reason=reason,
    )


@dataclass(frozen=True, slots=True)
class Meeting:
    """One collective, which consists of a call in each of several ranks.

    places : for each rank, the index of its call among the rank's collectives
    """

    kind: str
    group: GroupKey
    members: tuple[int, ...]
    bytes: int
    dtype: str
    reduction: str
    places: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class RankPlan:
    """The collectives of a step that run; the plan is equal in all ranks.

    groups : the groups to create, with the ranks in each; all ranks create them in this order
    left_out : for each rank, the reasons why collectives do not run, by their index among the rank's collectives
    """

    groups: dict[GroupKey, tuple[int, ...]]
    meetings: list[Meeting]
    left_out: list[dict[int, str]]


# distinct descriptions of a rank's collectives, and for each of its collectives the index of its description
Table: TypeAlias = tuple[Sequence[Offer], Sequence[int]]


def make_plan(tables: Sequence[Table], scale: bool) -> RankPlan:
    """Decide which collectives run, from the descriptions of all ranks.

    scale : True to run a collective even if some ranks of its group were not started
    """
    lines: dict[_Line, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    left_out: list[dict[int, str]] = [{} for _ in tables]
    for rank, (offers, calls) in enumerate(tables):
        for index, number in enumerate(calls):
            offer = offers[number]
            if offer.ranks and offer.ranks[offer.rank] == rank:
                lines[offer.line][rank].append(index)
            else:
                left_out[rank][index] = offer.reason or "its group has another rank at the position of this one"
    meetings: list[Meeting] = []
    groups: dict[GroupKey, tuple[int, ...]] = {}
    for line in sorted(lines):
        group, indices = line[0], lines[line]
        members = _members(line, len(tables))
        reason = _why_not(line, members, len(tables), scale)
        for turn in range(max(map(len, indices.values()))):
            place_by_rank = {rank: own[turn] for rank, own in sorted(indices.items()) if turn < len(own)}
            offers_met = {rank: tables[rank][0][tables[rank][1][index]] for rank, index in place_by_rank.items()}
            reason = reason or _disagreement(offers_met, members)
            why = reason or next((offer.reason for offer in offers_met.values() if offer.reason), "")
            if why:
                for rank, index in place_by_rank.items():
                    left_out[rank][index] = why
                continue
            groups[group] = _members((group, -1, -1), len(tables))
            meetings.append(_meeting(group, members, offers_met, place_by_rank))
    return RankPlan({key: groups[key] for key in sorted(groups)}, meetings, left_out)


def _members(line: _Line, world_size: int) -> tuple[int, ...]:
    (ranks, _), sender, receiver = line
    both = ranks if sender < 0 else (ranks[sender], ranks[receiver])
    return tuple(rank for rank in both if rank < world_size)


def _why_not(line: _Line, members: Sequence[int], world_size: int, scale: bool) -> str:
    (ranks, _), sender, _ = line
    expected = len(ranks) if sender < 0 else 2
    if len(members) == expected:
        return "" if expected > 1 else "its group has only one member"
    if sender >= 0:
        return "it goes to or comes from a rank that is not replayed"
    if not scale:
        return "some ranks of its group are not replayed: --scale-ranks runs it with the replayed ones"
    return "" if len(members) > 1 else "only one rank of its group is replayed"


def _disagreement(offers: Mapping[int, Offer], members: Sequence[int]) -> str:
    absent = sorted(set(members) - set(offers))
    if absent:
        return f"rank {absent[0]} recorded fewer collectives of its group"
    first = next(iter(offers.values()))
    if first.kind in MESSAGES:
        sizes = {(offer.member_bytes, offer.dtype) for offer in offers.values()}
        return "" if len(sizes) == 1 else "sender and receiver recorded different sizes"
    shared = {_terms(offer) for offer in offers.values()}
    if len(shared) > 1:
        return "the ranks of its group recorded different collectives at this position"
    if first.kind == ALL_TO_ALL and any(offer.splits for offer in offers.values()):
        return _uneven(offers)
    return ""


def _terms(offer: Offer) -> tuple[Any, ...]:
    size = None if offer.splits is not None else offer.member_bytes
    return offer.kind, offer.reduction, offer.peer, offer.dtype, size, offer.splits is None


def _uneven(offers: Mapping[int, Offer]) -> str:
    for offer in offers.values():
        for other in offers.values():
            assert offer.splits is not None
            assert other.splits is not None, "the ranks agree whether there are splits"
            if offer.splits[0][other.rank] != other.splits[1][offer.rank]:
                return "a rank sends another number of rows than the receiving rank recorded"
    return ""


def _meeting(
    group: GroupKey, members: Sequence[int], offers: Mapping[int, Offer], indices: Mapping[int, int]
) -> Meeting:
    first = next(iter(offers.values()))
    kind = SEND_RECV if first.kind in MESSAGES else first.kind
    largest = max(offer.member_bytes for offer in offers.values())
    if kind == ALL_TO_ALL:
        # only the share of the bytes that goes to present members
        largest = largest * len(members) // len(group[0])
    size = size_of(kind, largest, len(members))
    return Meeting(kind, group, tuple(members), size, first.dtype, first.reduction, dict(indices))
