"""Tests of the recorded dataflow: which call produced the inputs of another one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from programs import captured, run_command, succeed, train_tiny_net

from opgrip.capture import Capture
from opgrip.traces import Trace, load
from opgrip.traces.analysis.dataflow import make_graph
from opgrip.traces.codec.call_blocks import decode_storages, encode_storages
from opgrip.traces.schema.records import NO_STORAGE


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
        for _ in range(30):
            x.add(1).mul(2)
    # 12 MB each; 60 of them would take 720 MB
    assert resident_mb() - before < 300
