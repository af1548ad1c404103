"""Matching of collectives between ranks, and which ranks wait in each kind of collective."""

from __future__ import annotations

from pathlib import Path

import pytest
from example_trace import write
from made_ranks import VECTOR

from opgrip.errors import UserError
from opgrip.traces.analysis.ranks.waits import RankWaits, find_waits
from opgrip.traces.schema.arguments import GroupSpec, ReductionSpec
from opgrip.traces.schema.records import Calls, End, Record, Scope, Signature, Thread

SUM = ReductionSpec("SUM")
KINDS = ("all_reduce", "broadcast", "reduce")


def signatures(rank: int) -> list[Signature]:
    """Return a rank's signatures: three collectives that are waited for, the last two with rank 0 as their root."""
    group = GroupSpec("0", "gloo", (0, 1, 2), rank)
    arguments: list[tuple[str, tuple[object, ...]]] = [
        ("allreduce_", ([VECTOR], group, SUM, None, False)),
        ("broadcast_", ([VECTOR], group, 0, 0, False)),
        ("reduce_", ([VECTOR], group, SUM, 0, 0, False)),
    ]
    return [
        Signature(10 * rank + place, "operator", f"c10d.{name}.default", values, {})
        for place, (name, values) in enumerate(arguments)
    ]


def waits_of(path: Path, *ranks: list[tuple[str, int, int]]) -> RankWaits:
    """Return the waits of ranks with these calls: a collective's kind, its start, and when the rank continued,
    in us.
    """
    records: list[Record] = [Scope(0, "", "", "forward"), Signature(100, "operator", "aten.sin.default", (VECTOR,), {})]
    for rank, calls in enumerate(ranks):
        records += [*signatures(rank), Thread(rank, "MainThread", rank)]
        numbers = [number for kind, _, _ in calls for number in (10 * rank + KINDS.index(kind), 100)]
        starts = [1000 * start for _, begin, end in calls for start in (begin, end)]
        records.append(Calls(rank, numbers, [0] * len(numbers), starts, [10] * len(numbers)))
    headers = [{"rank": rank} for rank in range(len(ranks))]
    end = End(2 * sum(map(len, ranks)), 0, 0)
    return find_waits(write(path / "t.jsonl", [*records, end], processes=headers))


def waiting(waits: RankWaits) -> list[float]:
    return [round(1000 * time) for time in waits.ranks["waiting_ms"]]


@pytest.mark.parametrize(
    ("kind", "expected", "pairs"),
    [
        # rank 2 arrives 60 us after rank 0, and 40 us after rank 1
        ("all_reduce", [60, 40, 0], {(0, 2), (1, 2)}),
        # ranks only wait for the root, which arrives first
        ("broadcast", [0, 0, 0], set()),
        ("reduce", [60, 0, 0], {(0, 2)}),
    ],
)
def test_waiting_ranks_depend_on_the_kind_of_collective(
    kind: str, expected: list[int], pairs: set[tuple[int, int]], tmp_path: Path
) -> None:
    waits = waits_of(tmp_path, [(kind, 10, 90)], [(kind, 30, 90)], [(kind, 70, 90)])
    assert waiting(waits) == expected
    assert set(zip(waits.pairs["rank"], waits.pairs["waits_for"], strict=True)) == pairs


def test_other_ranks_wait_for_a_late_root(tmp_path: Path) -> None:
    calls = [("broadcast", 50, 60)], [("broadcast", 10, 60)], [("broadcast", 55, 60)]
    assert waiting(waits_of(tmp_path, *calls)) == [0, 40, 0]


def test_no_rank_waits_longer_than_its_call(tmp_path: Path) -> None:
    # inconsistent clocks: the first rank continues before the last has arrived
    calls = [("all_reduce", 10, 30)], [("all_reduce", 70, 90)], [("all_reduce", 60, 90)]
    assert waiting(waits_of(tmp_path, *calls)) == [20, 0, 10]


def test_collectives_after_a_mismatch_are_unmatched(tmp_path: Path) -> None:
    first = [("all_reduce", 10, 20), ("broadcast", 30, 40), ("all_reduce", 50, 60)]
    second = [("all_reduce", 15, 20), ("all_reduce", 35, 40), ("all_reduce", 55, 60)]
    waits = waits_of(tmp_path, first, second, [("all_reduce", 12, 20)])
    assert (waits.unmatched, waiting(waits)) == (4, [5, 0, 3])
    assert waits.ranks["collectives"].tolist() == [1, 1, 1]


def test_ranks_without_a_common_collective_are_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no collective in which several ranks took part"):
        waits_of(tmp_path, [("all_reduce", 10, 20)], [("broadcast", 10, 20)])
    with pytest.raises(UserError, match="has the calls of only one process"):
        waits_of(tmp_path, [("all_reduce", 10, 20)])
