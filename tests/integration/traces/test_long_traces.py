"""Long traces: read again instead of kept, summed, processed in parts, filtered while reading, and trimmed."""

import re
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from example_trace import write
from hypothesis import given
from hypothesis import strategies as st
from made_ranks import make_rank
from programs import SHIPPED_TRACES, run_python
from repeated_calls import repeat_calls

import opgrip.traces
from opgrip.replay.cases import cases
from opgrip.replay.cases.cases import make_cases, shares_of
from opgrip.traces import Trace, TraceReader, UserError, load, read
from opgrip.traces.analysis.dataflow import Dataflow, graph_facts, make_graph
from opgrip.traces.analysis.differences import compare_traces
from opgrip.traces.analysis.longtail import find_longtail
from opgrip.traces.analysis.longtail import thread_calls as made_calls
from opgrip.traces.analysis.merge import merge
from opgrip.traces.analysis.timeline import timeline_lines
from opgrip.traces.analysis.trim import TracePart, trim
from opgrip.traces.analysis.validation import validate
from opgrip.traces.schema.records import Calls, DeviceTimes, Signature
from opgrip.traces.table import call_source as sources
from opgrip.traces.table import distinct_calls as summing
from opgrip.traces.table.trace import is_made

SHIPPED = Path(opgrip.traces.__file__).with_name("faster_rcnn.jsonl")
CASE_FIELDS = (
    *("number", "count", "captured_us", "captured_total_us", "captured_host_us", "captured_spread", "share"),
    *("perturbed", "phase", "call_sites", "context", "fresh"),
)


@pytest.fixture(scope="module")
def long_trace(tiny_trace: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("long") / "long.jsonl"
    repeat_calls(tiny_trace, path, 2000)
    return path


@pytest.fixture
def _nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "KEPT_CALLS", -1)
    monkeypatch.setattr(made_calls, "KEPT_CALLS", -1)
    monkeypatch.setattr(summing, "PART_CALLS", 300)
    monkeypatch.setattr(summing, "NEAR", 2)


def told_of(trace: Trace) -> dict[str, Any]:
    columns = ["op", ("module", "phase"), ("device", "stream"), ("file", "line", "function", "phase")]
    longtail = find_longtail([trace], lambda _: 1e10)
    return {
        "summaries": [trace.summary(names).to_json() for names in columns],
        "labels": trace.labels.to_json(),
        "unfinished": trace.unfinished,
        "longtail": asdict(longtail),
        "timeline": "".join(timeline_lines(trace)),
        "graph": (asdict(graph_facts(Dataflow(trace))), [(asdict(step), new) for step, new in Dataflow(trace)]),
        "cases": [[repr(getattr(case, name)) for name in CASE_FIELDS] for case in make_cases(trace)],
    }


@pytest.mark.parametrize("path", ["long", SHIPPED], ids=["long", "shipped"])
@pytest.mark.slow
def test_reread_trace_equals_a_trace_in_memory(path: Any, long_trace: Path, request: pytest.FixtureRequest) -> None:
    path = long_trace if path == "long" else path
    kept = load(path)
    assert kept.source.is_kept
    expected, table = told_of(kept), kept.calls
    request.getfixturevalue("_nothing_kept")
    trace = load(path)
    assert not trace.source.is_kept
    assert told_of(trace) == expected
    assert not compare_traces(kept, trace, ("a", "b")).changed
    assert len(trace.distinct_calls) < len(table)
    assert trace.distinct_calls["count"].sum() == len(table)
    # for the shipped trace, times by scope have already created the table
    assert path == SHIPPED or not is_made(trace, "calls")
    pd.testing.assert_frame_equal(trace.calls, table)
    assert (trace.storages == kept.storages).all()


def test_later_device_times_apply_to_selected_calls(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl")
    assert any(isinstance(record, DeviceTimes) for record in read(path))
    whole = load(path).calls
    backward = load(path, phase="backward").calls
    assert backward["device_ns"].tolist() == pytest.approx(
        whole["device_ns"][whole["phase"] == "backward"].tolist(), nan_ok=True
    )


@pytest.mark.parametrize("is_kept", [True, False])
@pytest.mark.parametrize(
    "choice",
    [
        {"phase": "backward"},
        {"module": "roi_head*"},
        {"op": ("aten.add*", "aten.mul*"), "phase": ("forward", "optimizer")},
    ],
    ids=str,
)
def test_selection_while_reading_equals_selection_from_the_table(
    choice: dict[str, Any], is_kept: bool, tiny_trace: Path, request: pytest.FixtureRequest
) -> None:
    path = tiny_trace if choice.get("phase") == "backward" else SHIPPED
    whole = load(path)
    if not is_kept:
        request.getfixturevalue("_nothing_kept")
    trace = load(path, **choice)
    calls = whole.calls
    flags = pd.Series(True, index=calls.index)
    for name, patterns in choice.items():
        flags &= calls[name].astype(str).map(lambda text, patterns=patterns: _matches(text, patterns))
    expected = calls[flags]
    assert 0 < len(expected) < len(calls)
    names = ["signature", "scope", "start_ns", "duration_ns", "perturbed", "tensors", "page_faults"]
    pd.testing.assert_frame_equal(trace.calls[names].reset_index(drop=True), expected[names].reset_index(drop=True))
    own, all_ = (_memory(item, rows) for item, rows in ((trace, trace.calls), (whole, expected)))
    assert own == all_
    assert trace.call_count == len(trace.calls) < whole.call_count
    assert trace.summary()["calls"].sum() == len(trace.own_calls)


def _matches(text: str, patterns: Any) -> bool:
    from fnmatch import fnmatchcase

    return any(fnmatchcase(text, pattern) for pattern in ([patterns] if isinstance(patterns, str) else patterns))


def _memory(trace: Trace, calls: pd.DataFrame) -> list[list[int]]:
    rows = zip(calls["first_storage"], calls["tensors"], strict=True)
    return [trace.storages[first : first + count].tolist() for first, count in rows]


def test_missing_steps_are_refused(tiny_trace: Path) -> None:
    strange: Any = [0, 2]
    refused = [
        (range(3, 5), "the trace has no step 3"),
        (range(0), r"range\(0, 0\) is not a range of consecutive steps"),
        (-1, r"range\(-1, 0\) is not a range of consecutive steps"),
        (strange, "is neither a number nor a range"),
    ]
    for steps, problem in refused:
        with pytest.raises(UserError, match=problem):
            load(SHIPPED, steps=steps)
    with pytest.raises(UserError, match="unknown phase bakward: choose from forward, backward, optimizer"):
        load(SHIPPED, phase="bakward")
    with pytest.raises(UserError, match="the trace has no step 2"):
        load(tiny_trace, steps=range(2, 3))


@pytest.mark.parametrize("is_kept", [True, False])
def test_steps_of_a_merged_trace_are_those_of_each_rank(
    is_kept: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    # rank 1 makes two more steps
    paths = [make_rank(tmp_path / f"{rank}.jsonl", rank, 2, 30 + 20 * rank, every=10) for rank in range(2)]
    merge(paths, tmp_path / "all.jsonl", align=False)
    if not is_kept:
        request.getfixturevalue("_nothing_kept")
    calls = load(tmp_path / "all.jsonl", steps=1).calls
    assert calls["process"].value_counts().to_dict() == {0: 10, 1: 10}
    # a step begins with the preceding collective; calls before the first one belong to the first step
    assert load(tmp_path / "all.jsonl", steps=0).calls["process"].value_counts().to_dict() == {0: 19, 1: 19}
    assert load(tmp_path / "all.jsonl", steps=range(3, 9)).calls["process"].value_counts().to_dict() == {1: 11}
    with pytest.raises(UserError, match="the trace has no step 5: the steps of the trace are 0 to 4"):
        load(tmp_path / "all.jsonl", steps=5)


@pytest.mark.usefixtures("_nothing_kept")
def test_trace_that_changes_while_it_is_read_is_refused(long_trace: Path, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(long_trace.read_bytes())
    trace = load(path)
    path.write_bytes(b"\n".join(long_trace.read_bytes().splitlines()[:-3]))
    with pytest.raises(UserError, match="changed while it was read"):
        trace.summary()


@pytest.mark.usefixtures("_nothing_kept")
def test_cut_trace_has_the_same_contents_when_read_again(long_trace: Path, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    content = long_trace.read_bytes()
    for share in (0.4, 0.7, 0.95):
        path.write_bytes(content[: int(share * len(content))])
        trace = load(path, partial=True)
        assert trace.missing is not None
        assert trace.distinct_calls["count"].sum() == trace.call_count == len(trace.calls)


@pytest.mark.parametrize("fault", [b'"duration_ns":[-1,', b'"duration_ns":[x,'])
def test_records_before_a_bad_block_are_read_once(fault: bytes, long_trace: Path, tmp_path: Path) -> None:
    lines = long_trace.read_bytes().splitlines(keepends=True)
    places = [place for place, line in enumerate(lines) if line.startswith(b'{"type":"calls"')]
    bad = places[len(places) // 2]
    lines[bad] = lines[bad].replace(b'"duration_ns":[', fault, 1)
    path = tmp_path / "t.jsonl"
    path.write_bytes(b"".join(lines))
    reader = TraceReader(path)
    expected = list(read(long_trace))[:bad]
    assert list(reader) == expected
    assert f"damaged after record {bad}" in str(reader.missing)


MEMORY = """
import re, sys
from opgrip.replay.cases.cases import make_cases
from opgrip.traces import load

def peak_mb():
    return int(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1]) // 1024

imports_mb = peak_mb()
trace = load(sys.argv[1])
{asked}
print(peak_mb() - imports_mb)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "counts"),
    [
        (("trace.summary()", "trace.distinct_calls", "trace.unfinished"), (700_000, 2_800_000)),
        # a fifth of the detector's calls have signatures that were looked at by scope
        (("make_cases(trace)",), (1_400_000, 2_800_000)),
    ],
)
def test_memory_does_not_grow_with_the_number_of_calls(
    asked: tuple[str, ...], counts: tuple[int, int], tiny_trace: Path, tmp_path: Path
) -> None:
    few, many = (str(tmp_path / f"{count}.jsonl") for count in counts)
    for path, count in zip((few, many), counts, strict=True):
        repeat_calls(tiny_trace if len(asked) > 1 else SHIPPED, Path(path), count, spread=0.5)
    for statement in asked:
        code = MEMORY.format(asked=statement)
        peaks_mb = [int(run_python("-c", code, path, fresh=True, status=0).stdout) for path in (few, many)]
        # one byte per call would be 2 MB
        assert peaks_mb[1] - peaks_mb[0] < 10, statement
        # torch imports other packages that are installed, such as triton, so only what comes on top of imports counts
        assert peaks_mb[1] < 310, statement


@pytest.mark.slow
def test_cases_of_a_long_trace_count_all_calls_of_observed_signatures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t.jsonl"
    repeat_calls(SHIPPED, path, 20_000, spread=0.1)
    exact = {case.key: case for case in make_cases(load(path))}
    monkeypatch.setattr(sources, "KEPT_CALLS", -1)
    monkeypatch.setattr(summing, "NEAR", 2)
    monkeypatch.setattr(summing, "PART_CALLS", 500)
    monkeypatch.setattr(cases, "MOST_CALLS", 1000)
    trace = load(path)
    observed_calls = cases.calls_at_several_sites(trace)
    # some at the beginning and some at the end, but not all
    assert len(observed_calls) < 3000
    assert observed_calls.index.min() < 1000
    assert observed_calls.index.max() > 15_000
    few = {case.key: case for case in make_cases(trace)}
    assert {key: case.count for key, case in few.items()} == {key: case.count for key, case in exact.items()}
    varied = [key for key, case in exact.items() if case.input_sets]
    assert len(varied) > 5
    for key in varied:
        assert few[key].captured_us == pytest.approx(exact[key].captured_us, rel=0.2)
    assert sum(bool(shares_of(few[key])) for key in varied) > 3
    assert not is_made(trace, "calls")


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
    whole = load(SHIPPED_TRACES[0])
    parts = [trimmed(SHIPPED_TRACES[0], tmp_path, TracePart(steps=(place, place + 1))) for place in range(3)]
    assert [len(part.calls) for part in parts] == [len(whole.calls) // 3] * 3
    assert sorted(item for part in parts for item in times(part)) == sorted(times(whole))
    first, *others = (Counter(part.calls["op"]) for part in parts)
    assert others == [first, first]
    assert [part.header["steps"] for part in parts] == [1, 1, 1]
    assert len(trimmed(SHIPPED_TRACES[0], tmp_path, TracePart(steps=(1, None))).calls) == 2 * len(whole.calls) // 3


def test_trace_without_steps_is_refused(tiny_trace: Path, tmp_path: Path) -> None:
    old = tmp_path / "old.jsonl"
    old.write_text(re.sub(r',"step_starts_ns":\[[0-9,]*\]', "", tiny_trace.read_text()))
    with pytest.raises(UserError, match="does not record how many steps it has"):
        trimmed(old, tmp_path, TracePart(steps=(0, 1)))
    assert list(tmp_path.iterdir()) == [old]
    with pytest.raises(UserError, match="the trace has no step 3"):
        trimmed(SHIPPED_TRACES[0], tmp_path, TracePart(steps=(3, 4)))


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


@pytest.mark.slow
def test_cut_edges_are_counted_and_producers_can_be_added(tmp_path: Path) -> None:
    part = TracePart(modules=("roi_head*",), steps=(0, 1))
    cut = trim(SHIPPED_TRACES[0], tmp_path / "cut.jsonl", part)
    assert cut.cut_edges > 0
    assert load(tmp_path / "cut.jsonl").header["trimmed"]["cut_edges"] == cut.cut_edges
    whole = trim(SHIPPED_TRACES[0], tmp_path / "whole.jsonl", part, with_producers=True)
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
    whole = load(SHIPPED_TRACES[0])
    part = trimmed(SHIPPED_TRACES[0], tmp_path, TracePart(ops=("mmcv._ext:nms",)))
    inside = whole.calls["inside"] == "mmcv._ext:nms"
    assert len(part.calls) == inside.sum() + (whole.calls["op"] == "mmcv._ext:nms").sum()
    assert inside.any()


def test_empty_selection_names_what_exists(tiny_trace: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no op matches --op aten.convolutoin.*aten\.convolution"):
        trim(tiny_trace, tmp_path / "t.jsonl", TracePart(ops=("aten.convolutoin*",)))
    with pytest.raises(UserError, match="no call matches all"):
        trim(tiny_trace, tmp_path / "t.jsonl", TracePart(ops=("aten.embedding.default",), phases=("optimizer",)))


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
