"""Which collectives of which ranks belong together, which of them run, and which groups they need."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from opgrip.replay.sequences.ranks.bandwidth import SEND_RECV, size_of
from opgrip.replay.sequences.ranks.collectives import Collective
from opgrip.traces.analysis.ranks.operators import ALL_TO_ALL, MESSAGES, SEND

GroupKey: TypeAlias = tuple[tuple[int, ...], str]
"""The recorded ranks of a group, and its name."""
_Line: TypeAlias = tuple[GroupKey, int, int]
"""Collectives that come one after another: those of a group, or the messages from one of its members to another."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What a rank says of collectives of one form: all that the others have to agree with.

    Attributes
    ----------
    reason : why they cannot run; empty where they can
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
        """The offer of a list of its fields, which went through JSON."""
        kind, name, ranks, rank, reduction, peer, member_bytes, dtype, splits, reason = fields
        both = None if splits is None else (tuple(splits[0]), tuple(splits[1]))
        return cls(kind, name, tuple(ranks), rank, reduction, peer, member_bytes, dtype, both, reason)

    @property
    def group(self) -> GroupKey:
        """Its group in all ranks' words."""
        return self.ranks, self.name

    @property
    def line(self) -> _Line:
        """What it comes in order with."""
        if self.kind not in MESSAGES:
            return self.group, -1, -1
        assert self.peer is not None, "read with the operator"
        sides = (self.rank, self.peer) if self.kind == SEND else (self.peer, self.rank)
        return self.group, *sides


def offer_of(collective: Collective | str, reason: str = "") -> Offer:
    """What a rank says of a collective, or of one that is not read, for this reason.

    Parameters
    ----------
    reason : why one that is read cannot run; it keeps its turn in the group all the same
    """
    if isinstance(collective, str):
        return Offer("", "", (), 0, "", None, 0, "", None, collective)
    group = collective.group
    return Offer(
        *(collective.kind, group.name, group.ranks, group.rank, collective.reduction, collective.peer),
        *(collective.member_bytes, collective.dtype, collective.splits, reason),
    )


@dataclass(frozen=True, slots=True)
class Meeting:
    """Calls of several ranks that are one collective.

    Attributes
    ----------
    places : by rank, which of its collectives it is
    bytes : as bandwidths refer to
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
    """What all ranks have agreed on, the same in each.

    Attributes
    ----------
    groups : that have to be made, in an order that all ranks make them in, with their members that are there
    meetings : the collectives that run
    left_out : of each rank, by the place of a collective, why it is left out
    """

    groups: dict[GroupKey, tuple[int, ...]]
    meetings: list[Meeting]
    left_out: list[dict[int, str]]


Table: TypeAlias = tuple[Sequence[Offer], Sequence[int]]
"""A rank's offers, and which of them each of its collectives is, in their order."""


def make_plan(tables: Sequence[Table], scale: bool) -> RankPlan:
    """What of the collectives of these ranks runs.

    Calls meet by their group and their order in it. Where ranks disagree about one, none that follow it in the group
    can be told to belong together: all are left out.

    Parameters
    ----------
    tables : of each rank that is there
    scale : whether groups run among those of their members that are there
    """
    lines: dict[_Line, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    left_out: list[dict[int, str]] = [{} for _ in tables]
    for rank, (offers, calls) in enumerate(tables):
        for place, number in enumerate(calls):
            offer = offers[number]
            if offer.ranks and offer.ranks[offer.rank] == rank:
                lines[offer.line][rank].append(place)
            else:
                left_out[rank][place] = offer.reason or "its group does not have this rank in its place"
    meetings: list[Meeting] = []
    groups: dict[GroupKey, tuple[int, ...]] = {}
    for line in sorted(lines):
        group, places = line[0], lines[line]
        members = _members(line, len(tables))
        reason = _why_not(line, members, len(tables), scale)
        for met in _turns(places):
            offers_met = {rank: tables[rank][0][tables[rank][1][place]] for rank, place in met.items()}
            reason = reason or _disagreement(offers_met, members)
            why = reason or next((offer.reason for offer in offers_met.values() if offer.reason), "")
            if why:
                for rank, place in met.items():
                    left_out[rank][place] = why
                continue
            groups[group] = _members((group, -1, -1), len(tables))
            meetings.append(_meeting(group, members, offers_met, met))
    return RankPlan({key: groups[key] for key in sorted(groups)}, meetings, left_out)


def _members(line: _Line, world_size: int) -> tuple[int, ...]:
    """The ranks that meet in a line, as far as they are there."""
    (ranks, _), sender, receiver = line
    both = ranks if sender < 0 else (ranks[sender], ranks[receiver])
    return tuple(rank for rank in both if rank < world_size)


def _why_not(line: _Line, members: Sequence[int], world_size: int, scale: bool) -> str:
    (ranks, _), sender, _ = line
    expected = len(ranks) if sender < 0 else 2
    if len(members) == expected:
        return "" if expected > 1 else "its group has one member alone"
    if sender >= 0:
        return "it goes to or comes from a rank that is not replayed"
    if not scale:
        return "some ranks of its group are not replayed: --scale-ranks runs it among those that are"
    return "" if len(members) > 1 else "of its group one rank alone is replayed"


def _turns(places: Mapping[int, list[int]]) -> Iterator[dict[int, int]]:
    """One after another, the calls of all members that meet."""
    for turn in range(max(map(len, places.values()))):
        yield {rank: own[turn] for rank, own in sorted(places.items()) if turn < len(own)}


def _disagreement(offers: Mapping[int, Offer], members: Sequence[int]) -> str:
    """Why calls do not belong together; empty where they do."""
    absent = sorted(set(members) - set(offers))
    if absent:
        return f"rank {absent[0]} has recorded fewer of its group"
    first = next(iter(offers.values()))
    if first.kind in MESSAGES:
        sizes = {(offer.member_bytes, offer.dtype) for offer in offers.values()}
        return "" if len(sizes) == 1 else "the two sides recorded other sizes"
    shared = {_terms(offer) for offer in offers.values()}
    if len(shared) > 1:
        return "the ranks of its group recorded different collectives in its turn"
    if first.kind == ALL_TO_ALL and any(offer.splits for offer in offers.values()):
        return _uneven(offers)
    return ""


def _terms(offer: Offer) -> tuple[Any, ...]:
    size = None if offer.splits is not None else offer.member_bytes
    return offer.kind, offer.reduction, offer.peer, offer.dtype, size, offer.splits is None


def _uneven(offers: Mapping[int, Offer]) -> str:
    """Whether each sends what the other receives."""
    for offer in offers.values():
        for other in offers.values():
            assert offer.splits is not None
            assert other.splits is not None, "all have some"
            if offer.splits[0][other.rank] != other.splits[1][offer.rank]:
                return "its ranks do not send what the others receive"
    return ""


def _meeting(
    group: GroupKey, members: Sequence[int], offers: Mapping[int, Offer], places: Mapping[int, int]
) -> Meeting:
    first = next(iter(offers.values()))
    kind = SEND_RECV if first.kind in MESSAGES else first.kind
    largest = max(offer.member_bytes for offer in offers.values())
    if kind == ALL_TO_ALL:
        # of all that was sent, what goes to members that are there
        largest = largest * len(members) // len(group[0])
    size = size_of(kind, largest, len(members))
    return Meeting(kind, group, tuple(members), size, first.dtype, first.reduction, dict(places))
