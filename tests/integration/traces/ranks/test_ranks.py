"""Ranks of a program: merged traces, clocks, and which rank waits for which."""

import json
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
from example_trace import SPEC, small_trace, write
from hypothesis import given, settings
from hypothesis import strategies as st
from made_ranks import VECTOR, make_rank
from programs import refusal, run_command, succeed, train_tiny_net

from opgrip.errors import UserError
from opgrip.traces import load
from opgrip.traces.analysis.merge import merge
from opgrip.traces.analysis.ranks.collectives import collective_of
from opgrip.traces.analysis.ranks.waits import RankWaits, find_waits
from opgrip.traces.analysis.validation import validate
from opgrip.traces.io.reader import TraceReader
from opgrip.traces.schema.arguments import GroupSpec, Opaque, ReductionSpec, numbers_of
from opgrip.traces.schema.records import (
    Calls,
    Context,
    DeviceTimes,
    Effects,
    End,
    Entered,
    Kernels,
    Observed,
    Record,
    Scope,
    Signature,
    Thread,
    Values,
)
from opgrip.traces.values.exact import Booleans

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


def test_merged_trace_is_not_merged_again(tmp_path: Path) -> None:
    paths = [small_trace(tmp_path / f"{name}.jsonl") for name in ("first", "second", "third")]
    merge(paths[:2], tmp_path / "two.jsonl")
    with pytest.raises(
        UserError, match=r"two\.jsonl is already a merge of several traces: merge the traces of all processes at once"
    ):
        merge([tmp_path / "two.jsonl", paths[2]], tmp_path / "all.jsonl")
    assert not (tmp_path / "all.jsonl").exists()


def test_copy_of_a_recording_is_not_merged_with_it(tmp_path: Path) -> None:
    train_tiny_net(tmp_path / "rank.jsonl")
    (tmp_path / "copy.jsonl").write_bytes((tmp_path / "rank.jsonl").read_bytes())
    with pytest.raises(UserError, match=r"copy\.jsonl and \S*rank\.jsonl are from the same recording: name one"):
        merge([tmp_path / "rank.jsonl", tmp_path / "copy.jsonl"], tmp_path / "all.jsonl")
    assert not (tmp_path / "all.jsonl").exists()


OPS = ("aten.relu.default", "aten.sin.default", "aten.gelu.default")
SMALL_NUMBERS = st.integers(0, 2)


@st.composite
def parts(draw: st.DrawFn) -> list[Record]:
    number_of = {
        kind: draw(st.permutations([3, 11, 59])) for kind in ("signature", "scope", "context", "values", "thread")
    }
    records: list[Record] = []
    for place, number in enumerate(number_of["context"]):
        records.append(Context(number, {"threads": place}))
    for place, number in enumerate(number_of["scope"]):
        forward = number_of["scope"][0] if place else None
        records.append(
            Scope(number, f"layer{place}", "", "forward", context=number_of["context"][place], forward=forward)
        )
    records += [Values(number, Booleans(place, 70)) for place, number in enumerate(number_of["values"])]
    signatures = []
    for place, number in enumerate(number_of["signature"]):
        spec = replace(SPEC, values=number_of["values"][draw(SMALL_NUMBERS)])
        signatures.append(Signature(number, "operator", OPS[place], (spec,), {}, spec))
    thread, scope = number_of["thread"][0], number_of["scope"][draw(SMALL_NUMBERS)]
    records.append(Thread(thread, "MainThread"))
    has_ended = [draw(st.booleans()) for _ in signatures]
    # a call that runs during a flush has no signature in the trace yet
    for place, signature in enumerate(signatures):
        if draw(st.booleans()):
            opened = replace(signature, outputs=Opaque("not recorded"))
            records.append(Entered(thread, 10 * place, scope, signature.number, opened))
    records += (signature for signature, ended in zip(signatures, has_ended, strict=True) if ended)
    for place, signature in enumerate(signatures):
        if has_ended[place]:
            records.append(
                Observed(signature.number, [number_of["values"][draw(SMALL_NUMBERS)]], None, 10 * place, place)
            )
            records.append(Kernels(signature.number, [f"kernel{place}"], [1], [5]))
            records.append(Effects(signature.number, place, 7, ((signature.args[0],), {})))
            calls = Calls(thread, [signature.number], [scope], [10 * place], [5], [2], [0, place + 1], place or -1)
            records += [calls, DeviceTimes(thread, sum(has_ended[:place]), [place])]
            if draw(st.booleans()):
                records.append(Entered(thread, 10 * place, scope, signature.number))
    ended = sum(has_ended)
    return [*records, End(ended, ended, 100)]


@settings(max_examples=15)
@given(processes=st.lists(parts(), min_size=1, max_size=3))
def test_merged_trace_has_the_facts_of_each_process(processes: list[list[Record]], tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{place}.jsonl", records) for place, records in enumerate(processes)]
    merge(paths, tmp_path / "all.jsonl", force=True)
    validation = validate(tmp_path / "all.jsonl")
    assert [item.message for item in validation.findings if item.kind == "reference"] == []
    by_process = meanings(TraceReader(tmp_path / "all.jsonl"))
    own = [meanings(TraceReader(path)) for path in paths]
    # signatures and the facts about them belong to no process
    assert by_process.pop(None, set()) == set().union(*(statements.get(None, set()) for statements in own))
    of_threads = [{key: words for key, words in statements.items() if key is not None} for statements in own]
    assert by_process == {process: said[0] for process, said in enumerate(of_threads) if said}
    whole = load(tmp_path / "all.jsonl")
    for process, path in enumerate(paths):
        alone = load(path)
        threads = [number for number, thread in whole.threads.items() if thread.process == process]
        unfinished = [item.opened for item in whole.unfinished if item.thread in threads]
        assert [item and item.op for item in unfinished] == [
            item.opened and item.opened.op for item in alone.unfinished
        ]


def meanings(reader: TraceReader) -> dict[int | None, set[tuple[object, ...]]]:
    records = list(reader)
    op = {item.number: item.op for item in records if isinstance(item, Signature)}
    scope = {item.number: item for item in records if isinstance(item, Scope)}
    context = {item.number: item.settings["threads"] for item in records if isinstance(item, Context)}
    models = {item.number: item.model for item in records if isinstance(item, Values)}
    # a trace of one process does not mention processes
    process = {item.number: item.process or 0 for item in records if isinstance(item, Thread)}
    statements: dict[int | None, set[tuple[object, ...]]] = {}

    def values(tree: object) -> tuple[object, ...]:
        return tuple(None if number is None else models[number] for number in numbers_of(tree))

    def place(number: int) -> tuple[object, ...]:
        record = scope[number]
        forward = None if record.forward is None else scope[record.forward].module
        return record.module, None if record.context is None else context[record.context], forward

    def say(number: int | None, *words: object) -> None:
        statements.setdefault(number, set()).add(words)

    for record in records:
        match record:
            case Signature():
                say(None, "signature", record.op, values((record.args, record.outputs)))
            case Observed():
                say(None, "observed", op[record.signature], tuple(models[number or 0] for number in record.values))
            case Effects():
                say(None, "effects", op[record.signature], record.operators, values(record.after))
            case Kernels():
                say(None, "kernels", op[record.signature], *record.names)
            case Calls():
                for signature, where, start in zip(record.signature, record.scope, record.start_ns, strict=True):
                    say(process[record.thread], "call", op[signature], place(where), start)
            case Entered():
                opened = record.opened
                name = op[record.signature] if opened is None else opened.op
                # if a call of it ended, both signatures are the same
                assert op.get(record.signature, name) == name
                described = None if opened is None else values((opened.args,))
                say(process[record.thread], "entered", name, place(record.scope), record.start_ns, described)
    return statements


PROGRAM = """\
import time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
store = dist.distributed_c10d._get_default_store()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
total = torch.ones(4)
for step in range(4):
    model(torch.ones(2, 8)).sum().backward()
    if rank == 1:
        # however busy the machine is, the other one is there first
        store.wait([f"rank 0 is at step {step}"])
        time.sleep(0.2)
    else:
        store.set(f"rank 0 is at step {step}", "")
    dist.all_reduce(total)
    work = dist.all_reduce(total, async_op=True)
    work.wait()
    total + 1
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_ranks_wait_for_the_one_that_sleeps(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM, encoding="utf-8")
    options = ("--nproc-per-node", "2", "--master-port", "29619", "--no-python")
    capture = (Path(sys.executable).parent / "opcapture", "-o", "t.jsonl", "--", "train.py")
    succeed("torchrun", *options, *capture, cwd=tmp_path)
    succeed("opgrip", "trace", "merge", "t.rank0.jsonl", "t.rank1.jsonl", "-o", "t.jsonl", cwd=tmp_path)
    clocks = load(tmp_path / "t.jsonl", partial=False).header["clocks"]["processes"]
    assert clocks[1]["collectives"] > 4
    done = run_command("opgrip", "trace", "ranks", "t.jsonl", "--json", cwd=tmp_path)
    tables = json.loads(done.stdout)
    assert tables["unmatched"] == 0
    (place,) = (row for row in tables["places"] if row["line"] == 18)
    assert (place["kind"], place["collectives"], place["slowest"], place["last"]) == ("all_reduce", 4, 1, 4)
    # the wait of the other rank due to four sleeps of 200 ms, less its own delay
    assert place["waiting_ms"] > 400
    # calls take the results of DDP's buckets and of collectives that are waited for later
    assert {row["unknown"] for row in tables["ranks"]} == {0}
