"""Tests of trimmed traces: they are valid, and contain the same facts about their calls as the whole trace."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from programs import SHIPPED_TRACES

from opgrip.errors import UserError
from opgrip.traces import Trace, load, read
from opgrip.traces.analysis.dataflow import make_graph
from opgrip.traces.analysis.trim import TracePart, trim
from opgrip.traces.analysis.validation import validate
from opgrip.traces.schema.records import Calls, Signature

SHIPPED = SHIPPED_TRACES[0]


def times(trace: Trace) -> list[tuple[int, str, int]]:
    calls = trace.calls
    return list(zip(calls["start_ns"].tolist(), calls["op"].astype(str), calls["duration_ns"].tolist(), strict=True))


def trimmed(source: Path, folder: Path, part: TracePart, with_producers: bool = False) -> Trace:
    trim(source, folder / "part.jsonl", part, with_producers, force=True)
    assert validate(folder / "part.jsonl").findings == []
    return load(folder / "part.jsonl", partial=False)


def test_part_without_a_selection_equals_the_whole(tiny_trace: Path, tmp_path: Path) -> None:
    whole, part = load(tiny_trace), trimmed(tiny_trace, tmp_path, TracePart())
    assert part.calls.equals(whole.calls)
    assert part.signatures == whole.signatures
    assert part.scopes == whole.scopes
    assert part.values == whole.values
    assert part.storages.tolist() == whole.storages.tolist()
    assert part.observed == whole.observed
    assert part.contexts == whole.contexts


@pytest.mark.slow
def test_selected_steps_are_those_of_the_program(tmp_path: Path) -> None:
    whole = load(SHIPPED)
    parts = [trimmed(SHIPPED, tmp_path, TracePart(steps=(place, place + 1))) for place in range(3)]
    assert [len(part.calls) for part in parts] == [len(whole.calls) // 3] * 3
    assert sorted(item for part in parts for item in times(part)) == sorted(times(whole))
    first, *others = (Counter(part.calls["op"]) for part in parts)
    assert others == [first, first]
    assert [part.header["steps"] for part in parts] == [1, 1, 1]
    assert len(trimmed(SHIPPED, tmp_path, TracePart(steps=(1, None))).calls) == 2 * len(whole.calls) // 3


def test_trace_without_steps_is_refused(tiny_trace: Path, tmp_path: Path) -> None:
    old = tmp_path / "old.jsonl"
    old.write_text(re.sub(r',"step_starts_ns":\[[0-9,]*\]', "", tiny_trace.read_text()))
    with pytest.raises(UserError, match="does not record how many steps it has"):
        trimmed(old, tmp_path, TracePart(steps=(0, 1)))
    assert list(tmp_path.iterdir()) == [old]
    with pytest.raises(UserError, match="the trace has no step 3"):
        trimmed(SHIPPED, tmp_path, TracePart(steps=(3, 4)))


def test_phases_modules_operators_and_time_are_combined(tiny_trace: Path, tmp_path: Path) -> None:
    whole = load(tiny_trace)
    calls = whole.calls
    backward = trimmed(tiny_trace, tmp_path, TracePart(phases=("backward",)))
    assert set(backward.calls["phase"]) == {"backward"}
    assert len(backward.calls) == (calls["phase"] == "backward").sum()
    head = trimmed(tiny_trace, tmp_path, TracePart(modules=("head",), phases=("backward",)))
    assert len(head.calls) == ((calls["module"] == "head") & (calls["phase"] == "backward")).sum() > 0
    middle = int(calls["start_ns"].median())
    early = trimmed(tiny_trace, tmp_path, TracePart(ops=("aten.*add*",), time_ns=(0, middle)))
    assert set(early.calls["op"]) <= {op for op in set(calls["op"]) if "add" in op}
    assert early.calls["start_ns"].max() < middle


def test_part_has_only_the_records_that_its_calls_use(tiny_trace: Path, tmp_path: Path) -> None:
    whole, part = load(tiny_trace), trimmed(tiny_trace, tmp_path, TracePart(ops=("aten.convolution.default",)))
    assert [item.number for item in part.signatures] == part.calls["signature"].unique().tolist()
    assert set(part.values) == {
        number for item in part.signatures for number in (arg.values for arg in item.args[:3]) if number is not None
    }
    assert {item.number for item in part.scopes} == set(part.calls["scope"])
    # numbers are the same as in the whole trace
    assert all(item in whole.signatures for item in part.signatures)


def test_cut_edges_are_counted_and_producers_can_be_added(tmp_path: Path) -> None:
    part = TracePart(modules=("roi_head*",), steps=(0, 1))
    cut = trim(SHIPPED, tmp_path / "cut.jsonl", part)
    assert cut.cut_edges > 0
    assert load(tmp_path / "cut.jsonl").header["trimmed"]["cut_edges"] == cut.cut_edges
    whole = trim(SHIPPED, tmp_path / "whole.jsonl", part, with_producers=True)
    assert whole.cut_edges == 0
    assert whole.calls == cut.calls + whole.producers
    assert validate(tmp_path / "whole.jsonl").findings == []


def test_producers_of_a_part_equal_those_of_the_graph(tiny_trace: Path, tmp_path: Path) -> None:
    graph = make_graph(load(tiny_trace))
    last = max(step.number for step in graph.steps.values() if step.op == "aten.convolution_backward.default")
    needed, level = {last}, {last}
    while level:
        level = {before for number in level for before in graph.steps[number].after} - needed
        needed |= level
    starts = {graph.steps[number].start_ns for number in needed}
    only = TracePart(ops=("aten.convolution_backward.default",), time_ns=(graph.steps[last].start_ns, None))
    part = trimmed(tiny_trace, tmp_path, only, with_producers=True)
    assert set(part.calls["start_ns"]) == starts


def test_inner_calls_of_a_function_are_included(tmp_path: Path) -> None:
    whole = load(SHIPPED)
    part = trimmed(SHIPPED, tmp_path, TracePart(ops=("mmcv._ext:nms",)))
    inside = whole.calls["inside"] == "mmcv._ext:nms"
    assert len(part.calls) == inside.sum() + (whole.calls["op"] == "mmcv._ext:nms").sum()
    assert inside.any()


def test_empty_selection_names_what_exists(tiny_trace: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no op matches --op aten.convolutoin.*aten\.convolution"):
        trim(tiny_trace, tmp_path / "t.jsonl", TracePart(ops=("aten.convolutoin*",)))
    with pytest.raises(UserError, match="no call matches all"):
        trim(tiny_trace, tmp_path / "t.jsonl", TracePart(ops=("aten.embedding.default",), phases=("optimizer",)))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.slow
def test_any_part_has_its_calls_with_their_storages(tiny_trace: Path, tmp_path: Path, data: st.DataObject) -> None:
    whole = load(tiny_trace)
    ends = sorted(whole.calls["start_ns"].tolist())
    first, last = sorted(data.draw(st.lists(st.sampled_from(ends), min_size=2, max_size=2)))
    part = trimmed(tiny_trace, tmp_path, TracePart(time_ns=(first, last + 1)))
    own = whole.calls[whole.calls["start_ns"].between(first, last)]
    assert times(part) == list(
        zip(own["start_ns"].tolist(), own["op"].astype(str), own["duration_ns"].tolist(), strict=True)
    )
    expected = [
        whole.storages[begin : begin + count].tolist()
        for begin, count in zip(own["first_storage"], own["tensors"], strict=True)
    ]
    assert [
        part.storages[begin : begin + count].tolist()
        for begin, count in zip(part.calls["first_storage"], part.calls["tensors"], strict=True)
    ] == expected
    blocks = [record for record in read(tmp_path / "part.jsonl") if isinstance(record, Calls)]
    assert sum(len(block.signature) for block in blocks) == len(own)
    held = [record for record in read(tmp_path / "part.jsonl") if isinstance(record, Signature)]
    assert {record.number for record in held} == set(own["signature"])
