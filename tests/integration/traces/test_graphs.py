"""Tests of traces with launches of graphs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from example_trace import write

from opgrip.errors import UserError
from opgrip.replay.cases.cases import make_cases
from opgrip.tools.opgrip import main as opgrip
from opgrip.traces import Trace, load, read
from opgrip.traces.schema.arguments import TensorSpec
from opgrip.traces.schema.records import (
    NO_STORAGE,
    Calls,
    DeviceTimes,
    End,
    Graph,
    GraphTimes,
    Record,
    Scope,
    Signature,
    Thread,
)
from opgrip.traces.table import call_source
from opgrip.traces.table.call_source import BY_ESTIMATE, BY_KERNELS

SMALL, LARGE = (TensorSpec((size,), (1,), torch.float32, "cuda:0") for size in (100, 300))
RECORDS: list[Record] = [
    Scope(0, "", "", "forward"),
    Signature(0, "operator", "aten.sin.default", (SMALL,), {}, SMALL),
    Signature(1, "operator", "aten.view.default", (SMALL, [10, 10]), {}, SMALL),
    Signature(2, "operator", "aten.cos.default", (LARGE,), {}, LARGE),
    Signature(3, "extension", "torch.cuda:CUDAGraph.replay", (1,), {"device": torch.device("cuda:0")}, None),
    Graph(3, [0, 1, 2], [0, 0, 0], [2, 2, 2], [4, 5, 5, 5, 6, NO_STORAGE]),
    Thread(0, "MainThread"),
    Calls(
        *(0, [0, 3, 2, 3], [0] * 4, [10, 100, 500, 600], [50, 90, 70, 80], [2, 0, 2, 0], [0, 1, 2, 3]),
        device_ns=[400, 1600, -1, -1],
        page_faults=[(2, 5)],
        streams=[0, 7, 0, 0],
        perturbed=[(1, 2)],
    ),
    DeviceTimes(0, 3, [3200]),
]
NAMES = ["sin", "sin", "view", "cos", "cos", "sin", "view", "cos"]


def trace_of(path: Path, *more: Record) -> Path:
    return write(path, [*RECORDS, *more, End(4, 4, 700)])


def names_of(trace: Trace) -> list[str]:
    return [str(op).split(".")[1] for op in trace.calls["op"]]


@pytest.mark.parametrize(
    ("more", "split", "times"),
    [
        # 400 ns for 800 bytes of sin outside of the graph; cos has three times the bytes and no measured time
        ([], BY_ESTIMATE, [400, 0, 1200, 800, 0, 2400]),
        ([GraphTimes(3, [100, 0, 100]), GraphTimes(3, [200, 0, 0])], BY_KERNELS, [1200, 0, 400, 2400, 0, 800]),
    ],
)
def test_launches_are_the_calls_of_their_graph(
    tmp_path: Path, more: list[Record], split: str, times: list[int]
) -> None:
    trace = load(trace_of(tmp_path / "t.jsonl", *more), partial=False)
    calls = trace.calls
    assert names_of(trace) == NAMES
    inner = calls[calls["duration_ns"] == 0]
    assert inner["device_ns"].tolist() == times
    assert inner["start_ns"].tolist() == [100, 130, 160, 600, 626, 653]
    assert inner["stream"].tolist() == [7, 7, 7, 0, 0, 0]
    assert calls["page_faults"].tolist() == [0, 0, 0, 0, 5, 0, 0, 0]
    assert calls["perturbed"].tolist() == [False] * 4 + [True] + [False] * 3
    flows = [trace.storages[row.first_storage : row.first_storage + row.tensors].tolist() for row in calls.itertuples()]
    assert flows == [[0, 1], [4, 5], [5, 5], [6, NO_STORAGE], [2, 3], [4, 5], [5, 5], [6, NO_STORAGE]]
    (row,) = trace.graphs.itertuples()
    assert (row.calls, row.captured, row.split, row.launches) == (3, True, split, 2)
    assert row.share == pytest.approx(4800 / 5200)
    cases = {case.signature.op: case for case in make_cases(trace)}
    assert cases["aten.cos.default"].count == 3
    assert (cases["aten.cos.default"].captured_spread is None) is (split == BY_ESTIMATE)


def test_filters_select_calls_in_launches(tmp_path: Path) -> None:
    path = trace_of(tmp_path / "t.jsonl")
    trace = load(path, partial=False, op="aten.cos*")
    assert (names_of(trace), trace.call_count) == (["cos"] * 3, 3)


def test_traces_whose_launches_run_too_many_calls_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_source, "MOST_IN_LAUNCHES", 5)
    with pytest.raises(UserError, match="run 6 calls"):
        load(trace_of(tmp_path / "t.jsonl"), partial=False)


def test_graphs_stay_in_parts_and_redacted_traces(tmp_path: Path) -> None:
    path = trace_of(tmp_path / "t.jsonl", GraphTimes(3, [100, 0, 300]))
    part, redacted = tmp_path / "part.jsonl", tmp_path / "redacted.jsonl"
    assert opgrip(["trace", "trim", str(path), "--op", "torch.cuda*", "-o", str(part)]) == 0
    assert opgrip(["trace", "redact", str(path), "-o", str(redacted)]) == 0
    assert names_of(load(part, partial=False)) == ["sin", "view", "cos"] * 2
    assert names_of(load(redacted, partial=False)) == NAMES
    for file in (path, part, redacted):
        assert opgrip(["trace", "validate", str(file)]) == 0
        assert load(file).graphs["split"].tolist() == [BY_KERNELS]


def test_merged_traces_keep_the_graphs_of_each(tmp_path: Path) -> None:
    first = trace_of(tmp_path / "a.jsonl")
    other = [record for record in RECORDS if not isinstance(record, Graph)]
    graph = Graph(3, [2], [0], [2], [8, 9])
    second = write(tmp_path / "b.jsonl", [*other, graph, End(4, 4, 700)])
    merged = tmp_path / "merged.jsonl"
    assert opgrip(["trace", "merge", str(first), str(second), "-o", str(merged)]) == 0
    assert opgrip(["trace", "validate", str(merged)]) == 0
    assert [len(record.calls) for record in read(merged) if isinstance(record, Graph)] == [3, 1]
    counts = load(merged, partial=False).summary().set_index("op")["calls"].to_dict()
    assert counts == {"aten.cos.default": 6, "aten.sin.default": 4, "aten.view.default": 2}
