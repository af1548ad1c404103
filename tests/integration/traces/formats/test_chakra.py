"""Tests of reading Chakra execution traces, and of writing traces as such."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from execution_traces import calls_of, capture, dependencies_of, make_program, tensor
from foreign_data import write_as
from google.protobuf import json_format
from google.protobuf.internal import decoder

from opgrip.errors import UserError
from opgrip.traces import load
from opgrip.traces.analysis.dataflow import make_graph
from opgrip.traces.formats.execution_trace.files import message_classes
from opgrip.traces.formats.protobuf_files import with_length
from opgrip.traces.io.foreign_files import format_of

RELU = "aten::relu(Tensor self) -> Tensor"
METADATA, NODE = (message_classes()[name] for name in ("GlobalMetadata", "Node"))
X, Y, Z = (tensor(number, number + 1, [2, 2], [2, 1]) for number in (10, 20, 30))


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("watched") / "ours.jsonl"
    capture(make_program(), path)
    return path


def test_calls_dependencies_and_times_survive_a_round_trip(ours: Path, tmp_path: Path) -> None:
    trace = load(ours)
    write_as("chakra", trace, tmp_path / "a.et")
    assert format_of(tmp_path / "a.et") == "chakra"
    again = load(tmp_path / "a.et")
    assert calls_of(again) == calls_of(trace)
    assert dependencies_of(again) == dependencies_of(trace)
    assert again.labels.to_dict() == trace.labels.to_dict()
    own, own_again = trace.own_calls, again.own_calls
    assert own_again["duration_ns"].tolist() == pytest.approx(own["duration_ns"].tolist(), abs=1)
    assert own_again["module"].astype(str).tolist() == own["module"].astype(str).tolist()


def read_messages(path: Path) -> Iterator[bytes]:
    data, place = path.read_bytes(), 0
    while place < len(data):
        length, place = decoder._DecodeVarint32(data, place)
        yield data[place : place + length]
        place += length


def test_protobuf_reads_a_written_file_with_its_dependencies(ours: Path, tmp_path: Path) -> None:
    trace = load(ours)
    write_as("chakra", trace, tmp_path / "a.et")
    first, *others = read_messages(tmp_path / "a.et")
    metadata = METADATA.FromString(first)
    assert {item.name for item in metadata.attr} == {"schema", "pid", "time", "start_ts", "finish_ts"}
    nodes = [NODE.FromString(message) for message in others]
    assert [item.id for item in nodes] == sorted({item.id for item in nodes})

    calls = [item for item in nodes if item.name.startswith("aten::")]
    names = [f"{op.partition('.')[0]}::{op.split('.')[1]}" for op in trace.own_calls["op"].astype(str)]
    assert [item.name for item in calls] == names
    place = {item.id: index for index, item in enumerate(calls)}
    before = [{place[number] for number in item.data_deps if number in place} for item in calls]
    own = {number: index for index, number in enumerate(trace.own_calls.index)}
    for step in make_graph(trace).steps.values():
        assert {own[number] for number in step.after} <= before[own[step.number]]
    known: set[int] = set()
    for item in nodes:
        assert known.issuperset([*item.data_deps, *item.ctrl_deps])
        known.add(item.id)


def test_file_written_by_protobuf_is_read(tmp_path: Path) -> None:
    metadata = METADATA(version="0.0.4")
    call = NODE(id=5, name="aten::relu", type=4, ctrl_deps=[2], duration_micros=7)
    call.inputs.values, call.inputs.shapes = "[[10, 11, 0, 4, 4, 'cuda:0']]", "[[2, 2]]"
    call.inputs.types = call.outputs.types = "['Tensor(float)']"
    call.outputs.values, call.outputs.shapes = "[[20, 21, 0, 4, 4, 'cuda:0']]", "[[2, 2]]"
    call.attr.add(name="op_schema", string_val=RELU)
    call.attr.add(name="seq_id", int64_val=-1)
    call.attr.add(name="is_cpu_op", bool_val=True)
    kernel = NODE(id=6, name="relu_kernel", type=4, ctrl_deps=[5], duration_micros=90)
    kernel.attr.add(name="is_cpu_op", bool_val=False)
    messages = [item.SerializeToString() for item in (metadata, call, kernel)]
    (tmp_path / "a.et").write_bytes(b"".join(map(with_length, messages)))
    trace = load(tmp_path / "a.et")
    assert trace.header["schema"] == "0.0.4"
    (row,) = trace.own_calls.itertuples()
    assert (row.op, row.device, row.duration_ns, row.device_ns) == ("aten.relu.default", "cuda:0", 7000, 90000)


def test_split_operator_is_merged_into_one_call(tmp_path: Path) -> None:
    messages = [METADATA(version="0.0.4")]
    for number in (5, 7):
        part = NODE(id=number, name=f"aten::relu({(number - 5) // 2})", type=4, duration_micros=number)
        part.inputs.values, part.inputs.shapes = "[[10, 11, 0, 4, 4, 'cuda:0']]", "[[2, 2]]"
        part.inputs.types = "['Tensor(float)']"
        part.attr.add(name="op_schema", string_val=RELU)
        part.attr.add(name="rf_id", int64_val=3)
        kernel = NODE(id=number + 1, name="relu_kernel", ctrl_deps=[number], duration_micros=10)
        kernel.attr.add(name="is_cpu_op", bool_val=False)
        messages += [part, kernel]
    (tmp_path / "a.et").write_bytes(b"".join(with_length(item.SerializeToString()) for item in messages))
    trace = load(tmp_path / "a.et")
    (row,) = trace.own_calls.itertuples()
    assert (row.op, row.duration_ns, row.device_ns) == ("aten.relu.default", 12000, 20000)
    assert any("nesting: 1 operator" in text for text in trace.header["defaults"])


HEAD = with_length(METADATA(version="0.0.4").SerializeToString())


def test_malformed_message_is_counted_and_the_others_are_read(tmp_path: Path) -> None:
    good = {"id": 3, "name": "aten::relu", "attr": [ATTRIBUTE], "inputs": PORT, "outputs": PORT}
    messages = [NODE(**good), NODE(**{**good, "id": 4, "inputs": {"values": "[1, 2]"}}), NODE(id=1 << 60), NODE(**good)]
    messages[-1].id = 5
    (tmp_path / "a.et").write_bytes(HEAD + b"".join(with_length(item.SerializeToString()) for item in messages))
    trace = load(tmp_path / "a.et")
    assert trace.calls["op"].tolist() == ["aten.relu.default"] * 2
    assert trace.end is not None
    assert {item.op: item.count for item in trace.end.dropped} == {"?": 1, "aten.relu.default": 1}


ATTRIBUTE = {"name": "op_schema", "string_val": RELU}
PORT = {"values": str([X[0]]), "shapes": str([X[1]]), "types": str([X[2]])}


def test_json_form_of_a_chakra_trace_is_read_identically(ours: Path, tmp_path: Path) -> None:
    write_as("chakra", load(ours), tmp_path / "a.et")
    head, *nodes = read_messages(tmp_path / "a.et")
    objects = [json_format.MessageToJson(METADATA.FromString(head))]
    for message in nodes:
        form = json_format.MessageToDict(NODE.FromString(message))
        objects.append(json.dumps({**form, "type": "COMP_NODE"}))
    (tmp_path / "a.json").write_text("".join(objects))
    assert format_of(tmp_path / "a.json") == "chakra_json"
    trace, again = load(tmp_path / "a.et"), load(tmp_path / "a.json")
    assert calls_of(again) == calls_of(trace)
    assert dependencies_of(again) == dependencies_of(trace)
    assert again.calls["duration_ns"].tolist() == trace.calls["duration_ns"].tolist()
    (tmp_path / "cut.json").write_text("".join(objects)[:-5])
    with pytest.raises(UserError, match=r"cut\.json cannot be read \(it is cut\)"):
        load(tmp_path / "cut.json")
