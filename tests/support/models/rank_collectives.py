"""Script that checks results of collectives and messages between ranks; torchrun starts two processes of it.

Each collective runs in the recorded group, and in a group of four members of which two are present.
"""

from dataclasses import replace
from time import perf_counter_ns
from typing import Any

import torch
from torch import Tensor, distributed

from opgrip.replay.sequences.ranks.control import Control
from opgrip.replay.sequences.ranks.rank_collectives import GroupMembers, ReplayedCollective, make_starter
from opgrip.replay.sequences.ranks.replay_ranks import ask_clock, clock_offsets_ns
from opgrip.replay.sequences.step_options import launch_of
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
from opgrip.traces.schema.arguments import GroupSpec

ROWS = 3


def run(members: GroupMembers, kind: str, form: str, *arguments: Any, **others: Any) -> list[Tensor]:
    rank = distributed.get_rank()
    fields = {"reduction": "", "peer": None, "makes_result": False, **others}
    group = GroupSpec("g", "gloo", tuple(range(members.size)), rank)
    collective = ReplayedCollective(
        kind=kind, group=group, form=form, is_async=False, member_bytes=0, dtype="float32", **fields
    )
    results, works = make_starter(collective, members)(*arguments)
    for work in works:
        work.wait()
    return results


def part(rank: int, rows: int = ROWS) -> Tensor:
    return torch.arange(rows * 2.0).view(rows, 2) + 100 * rank


def check(members: GroupMembers) -> None:
    """Check the results of all kinds of collectives between two ranks of a group with `members`."""
    rank, size, there = distributed.get_rank(), members.size, len(members.present)
    other, total = 1 - rank, part(0) + part(1)
    given = part(rank)
    assert run(members, ALL_REDUCE, "", [given], reduction="SUM")[0] is given
    torch.testing.assert_close(given, total)
    # a library that supports it would require its factor
    for on_gloo in (True, False):
        scaled = run(replace(members, on_gloo=on_gloo), ALL_REDUCE, "", [part(rank)], reduction="PREMUL_SUM")
        torch.testing.assert_close(scaled[0], total)
    torch.testing.assert_close(run(members, ALL_REDUCE, "", part(rank), reduction="MAX", makes_result=True)[0], part(1))
    torch.testing.assert_close(run(members, ALL_REDUCE, "", [part(rank)], reduction="AVG")[0], total)
    torch.testing.assert_close(run(members, BROADCAST, "", [part(rank)], peer=1)[0], part(1))
    given = part(rank)
    run(members, REDUCE, "", [given], reduction="SUM", peer=1)
    assert rank == 0 or torch.equal(given, total)
    run(members, BARRIER, "", torch.zeros(1))
    received = torch.zeros(ROWS, 2)
    run(members, SEND if rank == 0 else RECV, "", [part(0) if rank == 0 else received], peer=other)
    assert rank == 0 or torch.equal(received, part(0))

    whole = torch.zeros(size * ROWS, 2)
    run(members, ALL_GATHER, FLAT, whole, part(rank))
    torch.testing.assert_close(whole[: there * ROWS], torch.cat([part(0), part(1)]))
    assert not whole[there * ROWS :].any()
    (made,) = run(members, ALL_GATHER, FLAT, part(rank), makes_result=True)
    assert made.shape == (size * ROWS, 2)
    torch.testing.assert_close(made[: there * ROWS], torch.cat([part(0), part(1)]))
    wholes = [torch.zeros(ROWS, 2) for _ in range(size)]
    run(members, ALL_GATHER, LISTS, [wholes], [part(rank)])
    torch.testing.assert_close(wholes[:there], [part(0), part(1)])

    sums = part(0, size * ROWS) + part(1, size * ROWS)
    own = torch.zeros(ROWS, 2)
    run(members, REDUCE_SCATTER, FLAT, own, part(rank, size * ROWS), reduction="SUM")
    torch.testing.assert_close(own, sums[rank * ROWS : (rank + 1) * ROWS])
    (made,) = run(members, REDUCE_SCATTER, FLAT, part(rank, size * ROWS), reduction="SUM", makes_result=True)
    torch.testing.assert_close(made, own)
    run(members, REDUCE_SCATTER, LISTS, [own], [list(part(rank, size * ROWS).chunk(size))], reduction="SUM")
    torch.testing.assert_close(own, sums[rank * ROWS : (rank + 1) * ROWS])

    expected = [part(0, size).split(1)[rank], part(1, size).split(1)[rank]]
    received = torch.zeros(size, 2)
    run(members, ALL_TO_ALL, FLAT, received, part(rank, size))
    torch.testing.assert_close(received[:there], torch.cat(expected))
    uneven = [1, 2, *([1] * (size - 2))]
    from_each = [uneven[rank]] * size
    received = torch.zeros(sum(from_each), 2)
    run(members, ALL_TO_ALL, FLAT, received, part(rank, sum(uneven)), splits=(tuple(uneven), tuple(from_each)))
    torch.testing.assert_close(
        received[: sum(from_each[:there])], torch.cat([part(peer, sum(uneven)).split(uneven)[rank] for peer in (0, 1)])
    )

    parts = [torch.zeros(ROWS, 2) for _ in range(size)]
    run(members, GATHER, LISTS, [parts] if rank == 1 else [], [part(rank)], peer=1)
    assert rank == 0 or all(map(torch.equal, parts[:there], (part(0), part(1))))
    own = torch.zeros(ROWS, 2)
    run(members, SCATTER, LISTS, [own], [[part(number) for number in range(size)]] if rank == 0 else [], peer=0)
    torch.testing.assert_close(own, part(rank))


def check_clocks(control: Control) -> None:
    """Check that the measured clock offset of another process of this machine is smaller than a query takes."""
    assert clock_offsets_ns(control) == [0, 0]
    began = perf_counter_ns()
    offset = ask_clock(control, 1)
    assert abs(offset) < perf_counter_ns() - began


def main() -> None:
    """Run all checks.

    No group remains when the interpreter exits, since its threads would crash (torch 2.13).
    """
    launch = launch_of()
    assert launch is not None
    with Control(launch, timeout_s=60) as everyone:
        both = distributed.group.WORLD
        assert both is not None
        check(GroupMembers(both, 2, (0, 1), (0, 1), on_gloo=True))
        shrunk = GroupMembers(both, 4, (0, 1), (0, 1), on_gloo=True)
        check(shrunk)
        # a missing root is replaced by the first member
        assert (shrunk.rank_of(1), shrunk.rank_of(3)) == (1, 0)
        check_clocks(everyone)
        assert everyone.share({"rank": launch.rank}) == [{"rank": 0}, {"rank": 1}]
        assert everyone.most(launch.rank, -launch.rank) == [1, 0]


if __name__ == "__main__":
    main()
