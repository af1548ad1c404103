"""Tests of the recorded dataflow: which call produced the inputs of another one."""

from __future__ import annotations

import gc
import json
import tracemalloc
from pathlib import Path

import pytest
import torch
from example_trace import write
from hypothesis import given
from hypothesis import strategies as st
from programs import captured, run_command, succeed, train_tiny_net
from torch.multiprocessing.reductions import StorageWeakRef

from opgrip.capture import Capture
from opgrip.capture.recording.storages import StorageNumbers
from opgrip.traces import Trace, load
from opgrip.traces.analysis.dataflow import make_graph
from opgrip.traces.codec.call_blocks import decode_storages, encode_storages
from opgrip.traces.schema.arguments import TensorSpec
from opgrip.traces.schema.records import NO_STORAGE, Calls, Scope, Signature, Thread


def storages(trace: Trace) -> list[list[int]]:
    return [
        trace.storages[row.first_storage : row.first_storage + row.tensors].tolist() for row in trace.calls.itertuples()
    ]


@given(st.lists(st.integers(NO_STORAGE, 5000)), st.integers(-1, 5000))
def test_storage_numbers_survive_encoding(numbers: list[int], newest: int) -> None:
    assert decode_storages(encode_storages(numbers, newest), newest) == numbers


def test_result_has_the_same_storage_as_a_later_argument(tmp_path: Path) -> None:
    x = torch.ones(3)
    sine, cosine, both = storages(captured(tmp_path, lambda: x.sin() + x.cos()))
    assert sine[0] == cosine[0]
    assert len({*sine, *cosine}) == 3
    assert both[:2] == [sine[1], cosine[1]]


def test_views_and_in_place_results_have_the_storage_of_their_base(tmp_path: Path) -> None:
    x = torch.ones(4)

    def program() -> None:
        x[:2].add_(1)
        x.view(2, 2).split(1)

    for call in storages(captured(tmp_path, program)):
        assert len(set(call)) == 1


def test_reused_address_is_another_storage(tmp_path: Path) -> None:
    addresses, x = [], torch.ones(1000)

    def program() -> None:
        for _ in range(50):
            y = x + 1
            addresses.append(y.untyped_storage().data_ptr())
            del y

    calls = storages(captured(tmp_path, program))
    # the allocator reused addresses
    assert len(set(addresses)) < 50
    assert len({call[-1] for call in calls}) == 50


def test_storages_created_outside_of_calls_are_distinguished(tmp_path: Path) -> None:
    import numpy as np

    def program() -> None:
        for _ in range(20):
            torch.from_numpy(np.ones(1000, dtype=np.float32)).sin()

    assert len({call[0] for call in storages(captured(tmp_path, program))}) == 20


def test_storages_are_freed_when_the_program_frees_them() -> None:
    known = StorageNumbers()
    x = torch.ones(3)
    number, storage = known.number(x), StorageWeakRef(x.untyped_storage())
    assert known.number(x[1:]) == number
    del x
    gc.collect()
    assert storage.expired()
    known.sweep()
    assert not known.numbers
    known.close()


def test_storage_table_does_not_grow_with_the_calls(tmp_path: Path) -> None:
    x = torch.ones(3)
    with Capture(tmp_path / "t.jsonl") as watched:
        for _ in range(5000):
            x + 1
        assert len(watched._recorder.storages.numbers) < 1000


def test_backward_calls_take_results_of_forward_calls(tmp_path: Path) -> None:
    def program() -> None:
        torch.ones(3, requires_grad=True).sin().exp().sum().backward()

    trace = captured(tmp_path, program)
    calls = list(zip(trace.calls["op"].astype(str), storages(trace), strict=True))
    ((_, result),) = (numbers for op, numbers in calls if op == "aten.exp.default")
    # the derivative of exp is its result, which the backward pass takes from a saved variable
    assert any(result in numbers for op, numbers in calls if op == "aten.mul.Tensor")


def test_graph_follows_results_and_writes(tmp_path: Path) -> None:
    def program() -> None:
        x = torch.ones(1000)  # 0
        y = x.sin()  # 1
        z = x.cos()  # 2
        y.add_(1)  # 3
        (y + z).sum()  # 4, 5

    graph = make_graph(captured(tmp_path, program))
    after = {number: step.after for number, step in graph.steps.items()}
    assert after == {0: [], 1: [0], 2: [0], 3: [1], 4: [2, 3], 5: [4]}
    assert graph.facts.critical_path[0] == 0
    assert graph.facts.critical_path[-1] == 5
    assert graph.facts.critical_ns == sum(graph.steps[number].time_ns for number in graph.facts.critical_path)
    assert graph.facts.peak_bytes == 3 * 4000
    assert graph.facts.peak_at == 2


def test_graph_sizes_memory_by_its_consumer_if_results_vary(tmp_path: Path) -> None:
    few, more = torch.arange(5000) > 4990, torch.arange(5000) > 4899

    def program() -> None:
        more.nonzero().add_(1)
        # a second call with the same signature
        few.nonzero().add_(1)

    graph = make_graph(captured(tmp_path, program))
    sizes = [storage.bytes for storage in graph.storages.values() if storage.made_by is not None]
    assert sizes == [100 * 8, 9 * 8]
    assert graph.facts.peak_bytes == 100 * 8


@pytest.mark.parametrize("numbers", [(0, 1), (1 << 40, 3), (5, (1 << 61) + 7), (2_000_000_000, 2_000_000_001)])
def test_graph_of_arbitrary_storage_numbers_needs_little_memory(tmp_path: Path, numbers: tuple[int, int]) -> None:
    spec = TensorSpec((8,), (1,), torch.float32, "cpu")
    signature = Signature(0, "operator", "aten.sin.default", (spec,), {}, spec)
    first, second = numbers
    calls = Calls(
        0, [0, 0, 0], [0] * 3, [0, 10, 20], [5] * 3, [2] * 3, [first, second, second, first, NO_STORAGE, first]
    )
    path = write(tmp_path / "t.jsonl", [signature, Scope(0, "", "", "forward"), Thread(0, "MainThread"), calls])
    tracemalloc.start()
    graph = make_graph(load(path, partial=True))
    assert tracemalloc.get_traced_memory()[1] < 50 << 20
    tracemalloc.stop()
    assert [step.after for step in graph.steps.values()] == [[], [0], []]
    lives = [(storage.number, storage.made_by, storage.first, storage.last) for storage in graph.storages.values()]
    assert lives == [(first, None, 0, 2), (second, 0, 0, 1)]


@pytest.mark.parametrize("op", ["aten.\ud800.default", "\udfff", "aten.sin.\udc00", "aten.ß.default", "a\0.b.c", ""])
def test_graph_accepts_any_operator_name(tmp_path: Path, op: str) -> None:
    spec = TensorSpec((8,), (1,), torch.float32, "cpu")
    records = [Signature(0, "operator", op, (spec,), {}, spec), Scope(0, "", "", "forward"), Thread(0, "MainThread")]
    trace = load(write(tmp_path / "t.jsonl", [*records, Calls(0, [0], [0], [0], [5], [2], [0, 1])]))
    assert (trace.missing or "").endswith("cut after record 5")
    (step,) = make_graph(trace).steps.values()
    # it may write into all of its arguments
    assert step.writes == [0]


@pytest.mark.slow
def test_graph_verb_writes_json(tmp_path: Path) -> None:
    train_tiny_net(tmp_path / "t.jsonl")
    done = succeed("opgrip", "trace", "graph", tmp_path / "t.jsonl", "-o", tmp_path / "g.json")
    assert "critical path" in done.stdout
    graph = json.loads((tmp_path / "g.json").read_text(encoding="utf-8"))
    assert len(graph["calls"]) == len(load(tmp_path / "t.jsonl").own_calls)
    assert run_command("opgrip", "trace", "graph", tmp_path / "t.jsonl", "-o", tmp_path / "g.dot").returncode == 2


def test_freed_large_tensors_do_not_accumulate(tmp_path: Path) -> None:
    def resident_mb() -> float:
        return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * 4096 / 1e6

    x = torch.ones(3 << 20)
    x.add(1)
    before = resident_mb()
    with Capture(tmp_path / "t.jsonl"):
        for _ in range(60):
            x.add(1).mul(2)
    # 12 MB each; 120 of them would take 1,440 MB
    assert resident_mb() - before < 300
