"""Collectives of several ranks: their recording, which belong together, how many bytes they move, where ranks wait."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from made_ranks import make_rank
from programs import run_python
from torch import distributed

from opgrip.capture import Capture
from opgrip.capture.hooks.scopes import REQUESTED
from opgrip.capture.torch_compat.torch_private import private_places
from opgrip.replay.cases.flow import FlowingCall, ProgramFlow
from opgrip.replay.operators.lookup import Unsupported
from opgrip.replay.sequences.ranks.plan import Meeting, Offer, Table, make_plan, offer_of, part_of, wait_points
from opgrip.replay.sequences.ranks.rank_collectives import is_exchange, read_collective, why_not
from opgrip.replay.sequences.ranks.replay_ranks import CollectiveStepTimes, Stamps
from opgrip.replay.sequences.step_options import launch_of
from opgrip.tools.verb_work.trace_info import facts
from opgrip.traces import load
from opgrip.traces.analysis.merge import merge
from opgrip.traces.analysis.ranks.collectives import bus_factor, size_of
from opgrip.traces.codec.call_blocks import Integers
from opgrip.traces.schema.arguments import GroupSpec, Opaque, ReductionSpec, TensorSpec
from opgrip.traces.schema.records import OPERATOR, UNSEEN_RPC, UNSEEN_THREAD, Signature
from opgrip.traces.table.trace import is_made

PAIR = GroupSpec("0", "gloo", (0, 1), 0)


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> TensorSpec:
    stride = tuple(torch.empty(shape, device="meta").stride())
    return TensorSpec(shape, stride, dtype, "cpu")


def signature(op: str, *args: Any) -> Signature:
    return Signature(0, OPERATOR, op, args, {}, None)


def test_bus_bandwidth_equals_the_definition_of_nccl_tests() -> None:
    factors = {kind: bus_factor(kind, 4) for kind in ("all_reduce", "all_gather", "reduce_scatter")}
    assert factors == {"all_reduce": 1.5, "all_gather": 0.75, "reduce_scatter": 0.75}
    assert [bus_factor(kind, 4) for kind in ("all_to_all", "broadcast", "reduce", "send")] == [0.75, 1, 1, 1]
    assert bus_factor("barrier", 4) == 0
    assert size_of("all_gather", 100, 4) == 400
    assert size_of("all_reduce", 100, 4) == 100
    assert size_of("all_to_all", 100, 4) == 100


def test_collective_is_read_from_its_signature() -> None:
    reduced = read_collective(
        signature("c10d.allreduce_.default", [tensor(8)], PAIR, ReductionSpec("MAX"), None, False)
    )
    assert (reduced.kind, reduced.reduction, reduced.member_bytes, reduced.is_async) == ("all_reduce", "MAX", 32, False)
    # a value absent from a signature is the default: asynchronous
    assert read_collective(signature("c10d.allreduce_.default", [tensor(8)], PAIR, ReductionSpec("SUM"))).is_async
    gathered = read_collective(signature("c10d._allgather_base_.default", tensor(16), tensor(8), PAIR))
    assert (gathered.kind, gathered.member_bytes) == ("all_gather", 32)
    scattered = read_collective(
        signature("_c10d_functional.reduce_scatter_tensor.default", tensor(6, 2), "avg", 2, PAIR)
    )
    assert (scattered.kind, scattered.reduction, scattered.member_bytes) == ("reduce_scatter", "AVG", 24)
    assert scattered.makes_result
    sent = read_collective(signature("c10d.send.default", [tensor(3)], PAIR, 1, 0))
    assert (sent.kind, sent.peer, sent.member_bytes) == ("send", 1, 12)
    uneven = read_collective(
        signature("c10d.alltoall_base_.default", tensor(5), tensor(3), PAIR, [1, 4], [1, 2], False)
    )
    assert uneven.splits == ((1, 2), (1, 4))
    opaque = signature("c10d.reduce_.default", [tensor(8)], PAIR, Opaque("c10d.ReduceOp"), 1, 0)
    assert (read_collective(opaque).reduction, read_collective(opaque).peer) == ("SUM", 1)


@pytest.mark.parametrize(
    ("operator", "args", "reason"),
    [
        (
            "c10d._allgather_base_.default",
            (tensor(15), tensor(8), PAIR),
            "the sizes of the collective's tensors do not match",
        ),
        (
            "c10d.allgather_.default",
            ([[tensor(8)]], [tensor(8)], PAIR),
            "the sizes of the collective's tensors do not match",
        ),
        (
            "c10d.alltoall_base_.default",
            (tensor(8), tensor(8), PAIR, [4, 4], [4, 3]),
            "the sizes of the collective's tensors do not match",
        ),
        ("c10d.broadcast_.default", ([tensor(8)], PAIR, 2, 0), "root is not in its group"),
        ("c10d.allreduce_.default", ([tensor(8)], replace(PAIR, rank=5)), "repeats a rank"),
        ("_c10d_functional.all_reduce.default", (tensor(8), "sum", "0"), "does not contain the ranks"),
        ("c10d.allreduce_.default", ([], PAIR), "has no tensors"),
        ("c10d._allgather_base_.default", (tensor(16), tensor(8, dtype=torch.int32), PAIR), "differ in dtype"),
        ("c10d.monitored_barrier_.default", (tensor(1), PAIR), "not a collective that ranks can replay"),
    ],
)
def test_collective_that_cannot_run_has_a_reason(operator: str, args: tuple[Any, ...], reason: str) -> None:
    assert is_exchange(signature(operator, *args))
    with pytest.raises(Unsupported, match=reason):
        read_collective(signature(operator, *args))


@pytest.mark.parametrize("on_gloo", [True, False])
def test_reduction_runs_if_torch_supports_it(on_gloo: bool) -> None:
    def reduced(reduction: str, dtype: torch.dtype = torch.float32) -> str:
        args = ([tensor(8, dtype=dtype)], PAIR, ReductionSpec(reduction), None, False)
        return why_not(read_collective(signature("c10d.allreduce_.default", *args)), on_gloo)

    assert [reduced(name) for name in ("SUM", "AVG", "PREMUL_SUM", "max")] == [""] * 4
    assert reduced("SUM", torch.complex64) == reduced("BAND", torch.int32) == ""
    assert "has no reduction NEWEST" in reduced("NEWEST")
    # gloo reports this only when it runs the collective, in the same way as the end of a rank
    assert ("gloo does not support float32" in reduced("BAND")) == on_gloo
    assert ("gloo does not support float8_e4m3fn" in reduced("SUM", torch.float8_e4m3fn)) == on_gloo
    sent = read_collective(signature("c10d.send.default", [tensor(3, dtype=torch.int16)], PAIR, 1, 0))
    assert ("gloo does not support int16" in why_not(sent, on_gloo)) == on_gloo


def offer(kind: str, group: tuple[int, ...], rank: int, peer: int | None = None, size: int = 8) -> Offer:
    return Offer(kind, "g", group, group.index(rank), "", peer, size, "float32", None)


def tables_of(*calls_by_rank: list[Offer]) -> list[Table]:
    return [(calls, list(range(len(calls)))) for calls in calls_by_rank]


def test_collectives_are_matched_by_group_and_order() -> None:
    both, first = (0, 1), (0, 2)
    plan = make_plan(
        tables_of(
            [offer("all_reduce", first, 0), offer("all_reduce", both, 0), offer("broadcast", both, 0, 0)],
            [offer("all_reduce", both, 1), offer("broadcast", both, 1, 0)],
            [offer("all_reduce", first, 2)],
        ),
        scale=False,
    )
    assert plan.left_out == [{}, {}, {}]
    assert plan.groups == {(both, "g"): both, (first, "g"): first}
    assert [(meeting.kind, dict(meeting.places)) for meeting in plan.meetings] == [
        ("all_reduce", {0: 1, 1: 0}),
        ("broadcast", {0: 2, 1: 1}),
        ("all_reduce", {0: 0, 2: 0}),
    ]


def test_disagreeing_collectives_and_their_successors_are_left_out() -> None:
    group = (0, 1)
    plan = make_plan(
        tables_of(
            [offer("all_reduce", group, 0), offer("all_reduce", group, 0, size=8), offer("barrier", group, 0)],
            [offer("all_reduce", group, 1), offer("all_reduce", group, 1, size=16), offer("barrier", group, 1)],
        ),
        scale=False,
    )
    assert [meeting.kind for meeting in plan.meetings] == ["all_reduce"]
    assert [sorted(places) for places in plan.left_out] == [[1, 2], [1, 2]]
    assert "different collectives" in plan.left_out[0][2]


def test_send_and_receive_are_matched_by_both_ranks() -> None:
    group = (0, 1, 2)
    plan = make_plan(
        tables_of(
            [offer("recv", group, 0, 2), offer("recv", group, 0, 1)],
            [offer("send", group, 1, 0)],
            [offer("send", group, 2, 0)],
        ),
        scale=False,
    )
    assert [(meeting.kind, dict(meeting.places)) for meeting in plan.meetings] == [
        ("send_recv", {0: 1, 1: 0}),
        ("send_recv", {0: 0, 2: 0}),
    ]


def test_fewer_ranks_leave_groups_out_or_shrink_them() -> None:
    whole, tensors, data = (0, 1, 2, 3), (0, 1), (0, 2)
    tables = tables_of(
        [offer("all_gather", whole, 0), offer("all_reduce", tensors, 0), offer("all_reduce", data, 0)],
        [offer("all_gather", whole, 1), offer("all_reduce", tensors, 1), offer("all_reduce", (1, 3), 1)],
    )
    left = make_plan(tables, scale=False)
    assert [meeting.group[0] for meeting in left.meetings] == [tensors]
    assert [sorted(places) for places in left.left_out] == [[0, 2], [0, 2]]
    assert "--scale-ranks" in left.left_out[0][0]
    scaled = make_plan(tables, scale=True)
    assert scaled.groups == {(tensors, "g"): tensors, (whole, "g"): (0, 1)}
    # 8 bytes of each member that is present
    assert {meeting.group[0]: meeting.bytes for meeting in scaled.meetings} == {tensors: 8, whole: 16}
    assert [sorted(places) for places in scaled.left_out] == [[2], [2]]


@given(st.data())
def test_every_call_is_matched_with_all_members_or_left_out(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 4))
    kinds = st.sampled_from(("all_reduce", "barrier"))
    groups = st.lists(st.integers(0, 4), min_size=1, max_size=4, unique=True).map(lambda ranks: tuple(sorted(ranks)))
    tables = tables_of(
        *(
            [
                offer(data.draw(kinds), group, rank)
                for group in data.draw(st.lists(groups.filter(lambda group, rank=rank: rank in group), max_size=5))  # type: ignore[misc]
            ]
            for rank in range(count)
        )
    )
    plan = make_plan(tables, scale=data.draw(st.booleans()))
    for rank, (offers, calls) in enumerate(tables):
        run = sorted(meeting.places[rank] for meeting in plan.meetings if rank in meeting.places)
        assert sorted([*run, *plan.left_out[rank]]) == list(range(len(calls)))
        for meeting in plan.meetings:
            if rank in meeting.places:
                assert set(meeting.places) == set(meeting.members) == set(plan.groups[meeting.group])
                assert offers[calls[meeting.places[rank]]].kind == meeting.kind


def test_offer_survives_json() -> None:
    read = read_collective(signature("c10d.alltoall_base_.default", tensor(5), tensor(3), PAIR, [1, 4], [1, 2], False))
    plain = ["all_to_all", "0", [0, 1], 0, "", None, 12, "float32", [[1, 2], [1, 4]], ""]
    assert Offer.from_plain(plain) == offer_of(read)


def flow_of(*calls: tuple[tuple[int, ...], tuple[int, ...]]) -> ProgramFlow:
    flowing = [FlowingCall(number, "op", 0, 0, takes, gives, (), {}) for number, (takes, gives) in enumerate(calls)]
    return ProgramFlow(flowing, {}, {}, {}, [], 0, 0, 0, [])


def test_collective_is_waited_for_when_its_memory_is_used() -> None:
    flow = flow_of(((1,), (1,)), ((2,), (2,)), ((3,), (4,)), ((4, 2), (5,)), ((1,), (6,)))
    assert wait_points(flow, [0, 1]) == {3: [1], 4: [0]}
    # without computation between them, it waits before the next collective that runs
    assert wait_points(flow_of(((1,), (1,)), ((1,), (2,)), ((3,), (3,))), [0, 2], [0, 2]) == {1: [0]}


def test_collective_time_is_from_the_last_arrival_to_the_last_end() -> None:
    places = {0: 0, 1: 0}
    meeting = Meeting("all_reduce", ((0, 1), "g"), (0, 1), 4_000, "float32", "SUM", places)
    stamps = [
        [Stamps([0], [1_000], [9_000], [2_000]), Stamps([0], [1_000], [9_000], [2_000])],
        # this rank's clock is 500 ns ahead
        [Stamps([0], [5_500], [8_500], [3_000]), Stamps([0], [5_500], [8_500], [3_000])],
    ]
    times = CollectiveStepTimes([meeting], stamps, [[7], [9]], [0, 500])
    (row,) = times.together()
    assert (row.median_us, row.wait_us, row.last_rank, row.last_share, row.calls) == (4.0, 4.0, 1, 1.0, 1)
    assert (row.algorithm_gb_per_s, row.bus_gb_per_s) == (1.0, 1.0)
    first, second = times.own(0, 7), times.own(1, 9)
    assert first is not None
    assert second is not None
    assert (first.wait_us, first.held_us, second.wait_us, second.held_us) == (4.0, 2.0, 0.0, 3.0)
    assert times.own(0, 9) is None
    assert [totals.waited_ms for totals in times.totals] == [0.004, 0.0]


def test_launcher_is_recognized_by_its_variables() -> None:
    names = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    launch = launch_of(names)
    assert launch is not None
    assert (launch.rank, launch.world_size, launch.local_rank, launch.local_world_size) == (1, 4, 1, 4)
    assert launch_of({name: value for name, value in names.items() if name != "MASTER_ADDR"}) is None


def test_part_of_a_rank_is_loaded_without_tables_of_other_ranks(tmp_path: Path) -> None:
    for rank in range(3):
        make_rank(tmp_path / f"t.rank{rank}.jsonl", rank, 3, 100 * (rank + 1), every=10, slow=1)
    merge(sorted(tmp_path.glob("t.rank*.jsonl")), tmp_path / "t.jsonl")
    whole, trace = load(tmp_path / "t.jsonl"), load(tmp_path / "t.jsonl")
    for rank in range(3):
        part = part_of(trace, rank, 3)
        assert not is_made(trace, "calls")
        assert not is_made(trace, "storages")
        expected = whole.calls[whole.calls["process"] == rank]
        assert len(part.calls) == part.source.calls == len(expected) == 100 * (rank + 1)
        assert set(part.calls["process"]) == {rank}
        columns = ["signature", "scope", "thread", "start_ns", "duration_ns", "tensors"]
        own = part.calls[columns].astype(expected.dtypes[columns].to_dict())
        pd.testing.assert_frame_equal(own, expected[columns].reset_index(drop=True))
        assert _storages(part.calls, part.storages) == _storages(expected, whole.storages)
        assert {signature.number for signature in part.signatures} == set(expected["signature"])


def _storages(calls: pd.DataFrame, storages: Integers) -> list[list[int]]:
    return [
        storages[first : first + count].tolist()
        for first, count in zip(calls["first_storage"], calls["tensors"], strict=True)
    ]


needs_groups = pytest.mark.skipif(
    private_places()["torch.distributed.distributed_c10d._resolve_process_group"] != "found",
    reason="this torch does not name groups",
)


@pytest.fixture
def group() -> Iterator[Any]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield distributed.group.WORLD
    distributed.destroy_process_group()


def groups_in(path: Path) -> dict[str, object]:
    return {item.op: item.args[-1] for item in load(path, partial=False).signatures if "c10d" in item.op}


@needs_groups
def test_functional_collective_is_recorded_with_its_group(tmp_path: Path, group: Any) -> None:
    operators = torch.ops._c10d_functional
    with Capture(tmp_path / "t.jsonl"):
        result = operators.all_reduce(torch.ones(4), "sum", group.group_name)
        result = operators.wait_tensor(result)
    assert result.tolist() == [1.0] * 4
    expected = GroupSpec(group.group_name, "gloo", (0,), 0)
    assert groups_in(tmp_path / "t.jsonl")["_c10d_functional.all_reduce.default"] == expected


def test_functional_collective_of_an_unknown_group_keeps_its_name(tmp_path: Path) -> None:
    with Capture(tmp_path / "t.jsonl"), pytest.raises(RuntimeError):
        torch.ops._c10d_functional.all_reduce(torch.ones(4), "sum", "nobody")
    assert groups_in(tmp_path / "t.jsonl")["_c10d_functional.all_reduce.default"] == "nobody"


def test_thread_of_before_the_capture_is_named_if_it_calls_modules(tmp_path: Path) -> None:
    net, x = torch.nn.Linear(2, 2), torch.ones(1, 2)
    with ThreadPoolExecutor(1, "calls") as calls, ThreadPoolExecutor(1, "waits") as waits:
        waits.submit(int).result()
        calls.submit(net, x).result()
        with Capture(tmp_path / "t.jsonl"):
            calls.submit(net, x).result()
            net(x).sum().backward()
    end = load(tmp_path / "t.jsonl", partial=False).end
    assert end is not None
    assert [(item.op, item.reason, item.count) for item in end.dropped] == [("thread calls_0", UNSEEN_THREAD, 0)]


RPC = """
import sys, torch
from opgrip.capture import Capture

def work(x):
    return x.sin()

with Capture(sys.argv[1]):
    from torch.distributed import rpc
    transports = rpc.TensorPipeRpcBackendOptions(init_method="file://" + sys.argv[2], _transports=["uv"])
    rpc.init_rpc("one", rank=0, world_size=1, rpc_backend_options=transports)
    print(rpc.rpc_sync("one", work, args=(torch.ones(3),)), rpc.rpc_sync("one", torch.cos, args=(torch.ones(3),)))
    rpc.shutdown()
"""


@pytest.mark.slow
def test_functions_run_by_rpc_are_recorded_and_other_calls_named(tmp_path: Path) -> None:
    (tmp_path / "rpc.py").write_text(RPC)
    run_python(tmp_path / "rpc.py", tmp_path / "t.jsonl", tmp_path / "store", cwd=tmp_path, status=0)
    trace = load(tmp_path / "t.jsonl", partial=False)
    assert trace.calls["op"][trace.calls["thread"] == "rpc"].tolist() == ["aten.sin.default"]
    assert "aten.cos.default" not in set(trace.calls["op"])
    assert trace.end is not None
    assert [(item.op, item.count) for item in trace.end.dropped] == [(REQUESTED, 0)]
    assert ("dropped", f"{REQUESTED}: {UNSEEN_RPC}") in facts(trace)
