"""Tests of the ranks of a program: their clocks, and which rank waits for which."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest
from example_trace import write
from made_ranks import VECTOR, make_rank
from programs import refusal, run_command

from opgrip.errors import UserError
from opgrip.traces import load
from opgrip.traces.analysis.merge import merge
from opgrip.traces.analysis.ranks.collectives import collective_of
from opgrip.traces.analysis.ranks.waits import RankWaits, find_waits
from opgrip.traces.schema.arguments import GroupSpec, ReductionSpec
from opgrip.traces.schema.records import Calls, End, Record, Scope, Signature, Thread

GROUP = GroupSpec("0", "gloo", (4, 5), 1)
SUM = ReductionSpec("SUM")


def ranks_of(folder: Path, count: int, calls: int = 2_000, **options: object) -> list[Path]:
    clocks = options.pop("clocks", [0] * count)
    assert isinstance(clocks, list)
    return [
        make_rank(folder / f"t.rank{rank}.jsonl", rank, count, calls, clock_ns=clock, **options)  # type: ignore[arg-type]
        for rank, clock in enumerate(clocks)
    ]


def test_blocks_are_merged_onto_a_common_clock(tmp_path: Path) -> None:
    clocks = [0, 50_000_000, -7_000_000]
    paths = ranks_of(tmp_path, 3, clocks=clocks, jitter_ns=300)
    merge(paths, tmp_path / "all.jsonl")
    trace = load(tmp_path / "all.jsonl", partial=False)
    measured = trace.header["clocks"]["processes"]
    for clock, expected in zip(measured, clocks, strict=True):
        assert abs(clock["offset_ns"] + expected) < 1_000
    starts = trace.calls.groupby("process", observed=True)["start_ns"].min()
    assert starts.max() - starts.min() < 1_000
    assert [measured[1]["collectives"], measured[0]["collectives"]] == [19, 0]


def test_clocks_that_agree_within_noise_are_not_shifted(tmp_path: Path) -> None:
    paths = ranks_of(tmp_path, 2, clocks=[0, 40], jitter_ns=900)
    merge(paths, tmp_path / "all.jsonl")
    own = load(tmp_path / "all.jsonl").header["clocks"]["processes"][1]
    assert own["offset_ns"] == 0
    assert own["measured_ns"] != 0
    merge(paths, tmp_path / "plain.jsonl", align=False)
    assert "clocks" not in load(tmp_path / "plain.jsonl").header


def test_slow_rank_is_the_one_that_others_wait_for(tmp_path: Path) -> None:
    merge(ranks_of(tmp_path, 3, slow=2, clocks=[0, 9_000_000, 4_000_000]), tmp_path / "all.jsonl")
    waits = find_waits(tmp_path / "all.jsonl")
    ranks = waits.ranks.set_index("rank")
    # 99 additions take 5 us more in each round; the last round counts no wait, as no later call shows its end
    expected_ms = 19 * 99 * 5_000 / 1e6
    assert ranks["waiting_ms"].tolist() == pytest.approx([expected_ms, expected_ms, 0.0], rel=0.01)
    assert ranks["caused_ms"].tolist() == pytest.approx([0.0, 0.0, 2 * expected_ms], rel=0.01)
    assert ranks["last"].tolist() == [0, 0, 20]
    assert ranks["compute_ms"].tolist() == pytest.approx([20 * 99 * 0.009, 20 * 99 * 0.009, 20 * 99 * 0.014])
    assert ranks["unknown"].tolist() == [1, 1, 1]
    assert set(zip(waits.pairs["rank"], waits.pairs["waits_for"], strict=True)) == {(0, 2), (1, 2)}
    (place,) = waits.places.to_dict("records")
    facts = ("all_reduce", 3, 1024, "main", 20, 2)
    assert tuple(place[name] for name in ("kind", "ranks", "size_bytes", "function", "collectives", "slowest")) == facts


def test_ranks_verb_prints_and_writes_its_tables(tmp_path: Path) -> None:
    paths = ranks_of(tmp_path, 2, slow=1)
    error = refusal("opgrip", "trace", "ranks", paths[0], cwd=tmp_path)
    assert "has the calls of only one process: join the traces of its ranks with opgrip trace merge" in error
    done = run_command("opgrip", "trace", "merge", *paths, "-o", "all.jsonl", cwd=tmp_path)
    assert "2 traces" in done.stderr
    done = run_command("opgrip", "trace", "ranks", "all.jsonl", "-o", "w.json", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "opgrip trace ranks: wrote 2 ranks to w.json\n")
    assert "waiting times between ranks (1 in total)" in done.stdout
    tables = json.loads((tmp_path / "w.json").read_text())
    assert [row["last"] for row in tables["ranks"]] == [0, 20]
    done = run_command("opgrip", "trace", "ranks", "all.jsonl", "--json", cwd=tmp_path)
    assert json.loads(done.stdout) == tables


def test_labels_are_not_counted_as_calls(tmp_path: Path) -> None:
    paths = ranks_of(tmp_path, 2)
    for path in paths:
        path.write_text(path.read_text().replace("aten.add.Tensor", "profiler._record_function_enter_new.default"))
    merge(paths, tmp_path / "all.jsonl")
    assert find_waits(tmp_path / "all.jsonl").ranks["calls"].tolist() == [20, 20]
    assert repr(load(tmp_path / "all.jsonl")).startswith("<Trace: 40 calls of 2 signatures")


@pytest.mark.slow
def test_memory_does_not_grow_with_the_calls(tmp_path: Path) -> None:
    def peak(calls: int) -> int:
        folder = tmp_path / str(calls)
        folder.mkdir()
        paths = ranks_of(folder, 2, calls, every=1_000)
        tracemalloc.start()
        merge(paths, folder / "all.jsonl")
        find_waits(folder / "all.jsonl")
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    peak(2_000)
    assert peak(20_000) < 2 * peak(5_000)


@pytest.mark.parametrize(
    ("op", "arguments", "expected"),
    [
        ("c10d.broadcast_.default", ([VECTOR], GROUP, 1, 0, False), ("broadcast", 5, True)),
        ("c10d._allgather_base_.default", (VECTOR, VECTOR, GROUP), ("all_gather", None, False)),
        ("c10d.barrier.default", (VECTOR, GROUP, [], False), ("barrier", None, True)),
        ("_c10d_functional.all_reduce.default", (VECTOR, "sum", "0"), ("all_reduce", None, False)),
        ("_c10d_functional.broadcast.default", (VECTOR, 0, GROUP), ("broadcast", 4, False)),
    ],
)
def test_collective_is_read_from_its_signature(
    op: str, arguments: tuple[object, ...], expected: tuple[object, ...]
) -> None:
    collective = collective_of(Signature(0, "operator", op, arguments, {}, None))
    assert collective is not None
    assert (collective.kind, collective.root, collective.waits) == expected
    assert (collective.group, collective.size_bytes) == ("0", 1024)


@pytest.mark.parametrize("op", ["aten.add.Tensor", "c10d.send.default", "_c10d_functional.wait_tensor.default"])
def test_other_operators_are_not_collectives(op: str) -> None:
    assert collective_of(Signature(0, "operator", op, ([VECTOR], GROUP, 0, 0), {}, None)) is None


def test_invented_processes_of_a_trace_are_not_ranks(tmp_path: Path) -> None:
    (path,) = ranks_of(tmp_path, 1)
    text = path.read_text()
    thread = '"name":"MainThread"'
    for number in (10**18, -1, 1):
        path.write_text(text.replace(thread, f'{thread},"process":{number}'))
        with pytest.raises(UserError, match="has the calls of only one process"):
            find_waits(path)


def test_workers_of_ranks_are_not_ranks_and_programs_are_not_mixed(tmp_path: Path) -> None:
    first, second = ranks_of(tmp_path, 2, clocks=[0, 3_000_000])
    worker = tmp_path / "t.rank1.pid7.jsonl"
    worker.write_text(second.read_text().replace('"rank":1,', '"rank":1,"parent_pid":6,', 1))
    merge([first, second, worker], tmp_path / "all.jsonl")
    clocks = load(tmp_path / "all.jsonl").header["clocks"]["processes"]
    assert [clock["collectives"] for clock in clocks] == [0, 19, 0]
    assert [clock["offset_ns"] for clock in clocks] == [0, -3_000_000, -3_000_000]
    assert find_waits(tmp_path / "all.jsonl").ranks["rank"].tolist() == [0, 1]
    again = tmp_path / "again.jsonl"
    again.write_text(second.read_text())
    merge([first, second, again], tmp_path / "two.jsonl")
    assert "clocks" not in load(tmp_path / "two.jsonl").header
    with pytest.raises(UserError, match="have the same rank"):
        find_waits(tmp_path / "two.jsonl")


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
