"""Tests of reading execution traces of PyTorch and Chakra, and of writing traces as such."""

import gzip
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from execution_traces import (
    calls_of,
    capture,
    dependencies_of,
    make_program,
    node,
    observe,
    tensor,
    write_nodes,
)
from foreign_data import data_files, needs_data, write_as
from google.protobuf import json_format
from google.protobuf.internal import decoder
from programs import SHIPPED_TRACES

from opgrip.errors import UserError
from opgrip.traces import Trace, TraceReader, load
from opgrip.traces.analysis.dataflow import make_graph
from opgrip.traces.formats.execution_trace.files import message_classes
from opgrip.traces.formats.protobuf_files import with_length
from opgrip.traces.io.foreign_files import format_of
from opgrip.traces.schema.arguments import Opaque, TensorSpec
from opgrip.traces.values.exact import Constant
from opgrip.traces.values.integers import Integers

ADD = "aten::add.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor"
T = "aten::t(Tensor(a) self) -> Tensor(a)"
LINEAR = "aten::linear(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor"
RELU = "aten::relu(Tensor self) -> Tensor"
X, Y, Z = (tensor(number, number + 1, [2, 2], [2, 1]) for number in (10, 20, 30))
ONE: tuple[Any, ...] = (1, [], "Int", [])


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("watched")
    program = make_program()
    paths = folder / "torch.json", folder / "ours.jsonl"
    for _ in range(4):
        observe(program, paths[0])
        paths[1].unlink(missing_ok=True)
        capture(program, paths[1])
        # torch numbers memory by address; if a later tensor reuses an address, it seems to depend on the earlier tensor
        if dependencies_of(load(paths[0])) == dependencies_of(load(paths[1])):
            break
    return paths


def test_calls_equal_those_of_a_capture(watched: tuple[Path, Path]) -> None:
    theirs, ours = map(load, watched)
    assert calls_of(theirs) == calls_of(ours)
    assert len(calls_of(ours)) > 60
    assert theirs.labels.to_dict() == ours.labels.to_dict()


def test_dependencies_equal_those_of_a_capture(watched: tuple[Path, Path]) -> None:
    theirs, ours = map(load, watched)
    assert dependencies_of(theirs) == dependencies_of(ours)
    assert len(dependencies_of(ours)) > 50


def test_written_trace_has_the_structure_of_one_by_torch(watched: tuple[Path, Path], tmp_path: Path) -> None:
    theirs, ours = watched
    write_as("execution_trace", load(ours), tmp_path / "ours.json")
    assert calls_of(load(tmp_path / "ours.json")) == calls_of(load(theirs))
    assert dependencies_of(load(tmp_path / "ours.json")) == dependencies_of(load(theirs))

    written, expected = (json.loads(path.read_text()) for path in (tmp_path / "ours.json", theirs))
    assert written["schema"] == expected["schema"]
    assert set(written) == set(expected)
    schemas = {attributes(item)["op_schema"] for item in expected["nodes"]}
    assert {attributes(item)["op_schema"] for item in written["nodes"]} <= {*schemas, DETACH}
    assert set(expected["nodes"][0]) <= set(written["nodes"][0])
    assert set(attributes(expected["nodes"][0])) == set(attributes(written["nodes"][0]))
    numbers = {item["id"] for item in written["nodes"]}
    assert len(numbers) == len(written["nodes"])
    assert all(item["ctrl_deps"] in numbers for item in written["nodes"])
    assert all(item["ctrl_deps"] < item["id"] for item in written["nodes"][1:])


DETACH = "aten::detach(Tensor(a) self) -> Tensor(a)"


def attributes(item: dict[str, Any]) -> dict[str, Any]:
    return {attribute["name"]: attribute["value"] for attribute in item["attrs"]}


@needs_data
@pytest.mark.parametrize("path", data_files("param/execution_traces/*.gz"), ids=lambda path: path.name)
@pytest.mark.slow
def test_real_files_load_completely_and_survive_a_round_trip(path: Path, tmp_path: Path) -> None:
    trace = load(path)
    assert trace.end is not None
    assert not trace.end.dropped
    assert set(trace.calls["phase"]) == {"forward", "backward", "optimizer"}
    assert {str(name) for name in trace.calls["thread"].unique()} == {"main", "autograd 2"}
    write_as("execution_trace", trace, tmp_path / "again.json")
    again = load(tmp_path / "again.json")
    # the parameters of c10d's operators change in the conversion
    assert [call for call in calls_of(again) if "c10d" not in call[0]] == [
        call for call in calls_of(trace) if "c10d" not in call[0]
    ]
    assert [(s.after, s.inputs, s.outputs) for s in make_graph(again).steps.values() if s.op[:4] == "aten"] == [
        (s.after, s.inputs, s.outputs) for s in make_graph(trace).steps.values() if s.op[:4] == "aten"
    ]


@needs_data
@pytest.mark.parametrize("path", data_files("param/execution_traces/linear*.gz"), ids=lambda path: path.name)
def test_strides_of_views_are_derived_if_the_file_has_none(path: Path) -> None:
    trace = load(path)
    matrices = [item.args[1] for item in trace.signatures if item.op == "aten.mm.default"]
    weights = next(item.args[2] for item in trace.signatures if item.op == "aten.addmm.default")
    assert weights.stride == (1, 1024)
    assert all(spec.shape for spec in matrices)
    assert any("strides" in text for text in trace.header["defaults"])


def test_composite_operators_are_skipped_and_inner_calls_are_merged(
    tmp_path: Path,
) -> None:
    linear = node(3, 2, "aten::linear", LINEAR, inputs=[X, Y, (*NONE,)], outputs=[Z])
    inner = node(4, 3, "aten::t", T, inputs=[X], outputs=[X])
    innermost = node(5, 4, "aten::relu", RELU, inputs=[X], outputs=[X])
    alone = node(6, 2, "aten::linear", LINEAR, inputs=[X, Y, (*NONE,)], outputs=[tensor(40, 41, [2, 2], [2, 1])])
    trace = load(write_nodes(tmp_path / "a.json", [innermost, inner, linear, alone]))
    assert trace.calls["op"].tolist() == ["aten.t.default", "aten.linear.default"]


NONE = ("<None>", [], "None", [])


def test_reused_memory_has_a_separate_storage(tmp_path: Path) -> None:
    def relu(number: int, source: tuple[Any, ...], result: tuple[Any, ...]) -> dict[str, Any]:
        return node(number, 2, "aten::relu", RELU, inputs=[source], outputs=[result])

    trace = load(write_nodes(tmp_path / "a.json", [relu(3, X, Y), relu(4, X, Y), relu(5, Y, Z)]))
    assert [step.after for step in make_graph(trace).steps.values()] == [[], [], [1]]
    assert len(make_graph(trace).storages) == 4


def test_numbers_types_and_devices_are_converted_by_the_schema(tmp_path: Path) -> None:
    schema = (
        "aten::empty.memory_format(SymInt[] size, *, ScalarType? dtype=None, Layout? layout=None, "
        "Device? device=None, bool? pin_memory=None, MemoryFormat? memory_format=None) -> Tensor"
    )
    inputs = [
        ([2, 3], [[], []], "GenericList[Int,Int]", [[], []]),
        (15, [], "Int", []),
        (0, [], "Int", []),
        ("cpu", [], "Device", []),
        NONE,
        (2, [], "Int", []),
    ]
    empty = node(3, 2, "aten::empty", schema, inputs=inputs, outputs=[X])
    full = node(
        4,
        2,
        "aten::full",
        "aten::full(SymInt[] size, Scalar fill_value, *, ScalarType? dtype=None) -> Tensor",
        inputs=[([], [], "GenericList[]", []), ("-inf", [], "Double", []), (99, [], "Int", [])],
        outputs=[Y],
    )
    first, second = load(write_nodes(tmp_path / "a.json", [empty, full])).signatures
    assert first.args == ([2, 3],)
    assert first.kwargs == {
        "dtype": torch.bfloat16,
        "layout": torch.strided,
        "device": torch.device("cpu"),
        "memory_format": torch.channels_last,
    }
    assert second.args == ([], float("-inf"))
    assert second.kwargs == {"dtype": Opaque("ScalarType 99")}


def test_value_ranges_are_read_and_written(tmp_path: Path) -> None:
    schema = "aten::index_select(Tensor self, int dim, Tensor index) -> Tensor"
    index = tensor(50, 51, [9], [1], "long int")
    ranges = {"tensor_range": json.dumps({"1": [0, 7]})}
    select = node(3, 2, "aten::index_select", schema, inputs=[X, ONE, index], outputs=[Y], attributes=ranges)
    scalar = tensor(60, 61, [], [], "double")
    attributes_ = {"tensor_range": json.dumps({"1": [2.5, 2.5]})}
    add = node(4, 2, "aten::add", ADD, inputs=[X, scalar, ONE], outputs=[Y], attributes=attributes_)
    trace = load(write_nodes(tmp_path / "a.json", [select, add]))
    write_as("execution_trace", trace, tmp_path / "b.json")
    for read in (trace, load(tmp_path / "b.json")):
        picks = [item.args[2] for item in read.signatures if item.op == "aten.index_select.default"]
        assert [read.values[spec.values] for spec in picks] == [Integers([], 0, 7, 9, ascending=False)]
    assert [trace.values[item.args[1].values] for item in trace.signatures[1:]] == [Constant(2.5)]


def test_times_kernels_and_labels_of_a_linked_trace_are_read(tmp_path: Path) -> None:
    label = node(3, 2, "step", ts=1000.0, inclusive_dur=9.0, exclusive_dur=1.0)
    add = node(4, 3, "aten::add", ADD, inputs=[X, Y, ONE], outputs=[Z], ts=1001.0, exclusive_dur=5.0)
    inner = node(5, 4, "cudaLaunchKernel", attributes={"scope": 0}, ts=1002.0, exclusive_dur=2.0)
    kernel = node(6, 5, "add_kernel", attributes={"scope": 0}, cat="kernel", stream=7, ts=1003.0, exclusive_dur=40.0)
    trace = load(write_nodes(tmp_path / "a.json", [kernel, inner, add, label]))
    assert trace.header["timed"]
    (call,) = trace.own_calls.itertuples()
    assert (call.start_ns, call.duration_ns, call.device_ns) == (1000, 7000, 40000)
    assert trace.labels.to_dict() == {"step": 1}
    assert trace.within_labels(lambda label: label == "step")[call.Index]

    write_as("execution_trace", trace, tmp_path / "b.json")
    (again,) = load(tmp_path / "b.json").own_calls.itertuples()
    assert (again.duration_ns, again.device_ns) == (7000, 40000)


def test_lists_of_results_are_read_in_files_without_strides(tmp_path: Path) -> None:
    strided = (
        "aten::as_strided(Tensor(a) self, SymInt[] size, SymInt[] stride, SymInt? storage_offset=None) -> Tensor(a)"
    )
    pair = "GenericList[Int,Int]"
    view = [X, ([2, 2], [], pair, []), ([1, 2], [], pair, []), ONE]
    tensors = [[X[0], Y[0]], [X[1], Y[1]], "GenericList[Tensor(float),Tensor(float)]", []]
    nodes = [
        node(3, 2, "aten::as_strided", strided, inputs=view, outputs=[Y]),
        node(
            4,
            2,
            "aten::_foreach_sqrt",
            "aten::_foreach_sqrt(Tensor[] self) -> Tensor[]",
            inputs=[tensors],
            outputs=[tensors],
        ),
    ]
    for item in nodes:
        for side in ("inputs", "outputs"):
            del item[side]["strides"]
    trace = load(write_nodes(tmp_path / "a.json", nodes, "1.1.0-chakra.0.0.4"))
    assert [item.op for item in trace.signatures] == ["aten.as_strided.default", "aten._foreach_sqrt.default"]
    # the last result overwrote the view
    assert [spec.stride for spec in trace.signatures[1].args[0]] == [(2, 1), (1, 2)]


def test_files_of_the_first_schema_are_read(tmp_path: Path) -> None:
    flat = {
        "name": "aten::relu",
        "id": 3,
        "rf_id": 1,
        "parent": 2,
        "fw_parent": 0,
        "seq_id": -1,
        "scope": 0,
        "tid": 1,
        "fw_tid": 0,
        "op_schema": RELU,
        "inputs": [[5, 6, 0, 4, 4]],
        "input_shapes": [[2, 2]],
        "input_types": ["Tensor(float)"],
        "outputs": [],
        "output_shapes": [],
        "output_types": [],
    }
    (tmp_path / "a.json").write_text(json.dumps({"schema": "1.0.1", "pid": 1, "nodes": [flat]}))
    (signature,) = load(tmp_path / "a.json").signatures
    assert signature.args == (TensorSpec((2, 2), (2, 1), torch.float32, "cpu"),)


@pytest.mark.slow
def test_shipped_trace_is_written_except_for_unsupported_calls(tmp_path: Path) -> None:
    trace = load(SHIPPED_TRACES[0])
    losses = write_as("execution_trace", trace, tmp_path / "a.json")
    again = load(tmp_path / "a.json")
    kinds = trace.calls["kind"].astype(str)
    operators = Counter(trace.calls["op"][kinds == "operator"].astype(str))
    assert Counter(again.calls["op"].astype(str)) == operators
    assert sum(losses.skipped.values()) == int((kinds != "operator").sum())
    assert losses.counts["values of its tensors"]
    written = zip(modules(trace, "operator"), modules(again, "operator"), strict=True)
    assert all(ours == theirs for ours, theirs in written)


def modules(trace: Trace, kind: str) -> list[tuple[str, str]]:
    own = trace.calls[trace.calls["kind"].astype(str) == kind]
    return list(zip(own["module"].astype(str), own["phase"].astype(str), strict=True))


WHOLE = json.dumps(node(3, 2, "aten::add", ADD, inputs=[X, Y, ONE], outputs=[Z]))


@pytest.mark.parametrize("end", ["", ", ", "], ", '], "finish_ts": 1'])
def test_cut_file_is_read_up_to_the_cut(end: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"schema": "1.1.1", "pid": 1, "nodes": [' + WHOLE + end)
    with pytest.warns(UserWarning, match="it is cut after node 1"):
        trace = load(tmp_path / "a.json")
    assert trace.calls["op"].tolist() == ["aten.add.Tensor"]
    with pytest.raises(UserError, match="is cut after node 1"):
        load(tmp_path / "a.json", partial=False)


def test_malformed_node_is_counted_and_the_others_are_read(tmp_path: Path) -> None:
    whole = json.loads(WHOLE)
    strange: list[Any] = [
        1,
        {**whole, "id": "x"},
        {**whole, "id": 4, "attrs": [1]},
        {**whole, "id": 5, "ts": "now"},
        {**whole, "id": 6, "inputs": {**whole["inputs"], "strides": [[1]]}},
        node(7, 2, "triton_kernel", "", inputs=[X, ONE]) | {"outputs": {"values": [1], "shapes": [], "types": []}},
        # nodes inside a malformed call are not calls
        node(8, 6, "aten::relu", RELU, inputs=[X], outputs=[Y]),
    ]
    nodes = [WHOLE, *map(json.dumps, strange), '{"id": 9, "name": "a "quoted" label"}', '{"id": 1, "a": 1, "a": 1}']
    content = (
        '{"schema": "1.1.1", "pid": 1, "nodes": [' + ", ".join([*nodes, WHOLE.replace('"id": 3', '"id": 30')]) + "]}"
    )
    (tmp_path / "a.json").write_text(content)
    trace = load(tmp_path / "a.json", partial=False)
    assert trace.calls["op"].tolist() == ["aten.add.Tensor"] * 2
    assert trace.end is not None
    assert sum(item.count for item in trace.end.dropped) == 7
    assert {item.op for item in trace.end.dropped} == {"?", "aten.add.Tensor"}


def test_cyclic_nodes_are_read(tmp_path: Path) -> None:
    ring = [node(3, 4, "a"), node(4, 3, "b"), node(5, 4, "aten::relu", RELU, inputs=[X], outputs=[Y])]
    assert load(write_nodes(tmp_path / "a.json", ring)).own_calls["op"].tolist() == ["aten.relu.default"]


@pytest.mark.slow
def test_decompression_bomb_is_refused(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "a.json.gz", "wb") as file:
        file.write(b'{"schema": "1.1.1", "pid": 1, "nodes": [' + b" " * (64 << 20) + b"]}")
    with pytest.raises(UserError, match="is refused"):
        list(TraceReader(tmp_path / "a.json.gz"))


METADATA, NODE = (message_classes()[name] for name in ("GlobalMetadata", "Node"))


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
