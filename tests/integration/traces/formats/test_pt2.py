"""Tests of reading torch.export programs, compared with captures of the same programs."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_data import results_of
from torch import nn

from opgrip.capture import Capture
from opgrip.errors import UserError
from opgrip.traces import Trace, load
from opgrip.traces.formats.exported_values import size_of
from opgrip.traces.formats.pt2 import PROGRAM
from opgrip.traces.schema.arguments import TensorSpec, leaves, tensors


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU())
        self.words = nn.Embedding(10, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, image: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        pooled = self.features(image).mean((2, 3))
        both = torch.cat([pooled, self.words(words)], 0)
        first, second = both.split([image.shape[0], words.shape[0]])
        return torch.softmax(self.head(first + second.clamp(max=1.5)).transpose(0, 1), -1).to(torch.float64)


EXAMPLE = (torch.randn(3, 3, 8, 8), torch.tensor([1, 2, 3]))


def save(program: torch.export.ExportedProgram, path: Path) -> Path:
    torch.export.save(program, path)
    return path


def exported(dynamic: bool = False) -> torch.export.ExportedProgram:
    batch = torch.export.Dim("batch", min=2)
    shapes = {"image": {0: batch}, "words": {0: batch}} if dynamic else None
    return torch.export.export(Model().eval(), EXAMPLE, dynamic_shapes=shapes)


def calls_of(trace: Trace) -> list[tuple[str, list[tuple[int, ...]], list[tuple[int, ...]]]]:
    """Return operator, argument shapes and result shapes of each call in order."""
    signatures = {item.number: item for item in trace.signatures}
    calls = (signatures[number] for number in trace.own_calls.sort_values("start_ns")["signature"])
    return [
        (
            item.op,
            [spec.shape for spec in tensors([item.args, item.kwargs])],
            [spec.shape for spec in tensors(item.outputs)],
        )
        for item in calls
    ]


@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed", "dynamic"])
@pytest.mark.slow
def test_program_has_the_calls_of_its_capture(dynamic: bool, tmp_path: Path) -> None:
    # decompose composite operators, since a capture sees only their parts
    program = exported(dynamic).run_decompositions()
    with torch.no_grad(), Capture(tmp_path / "own.jsonl"):
        program.module()(*EXAMPLE)
    checks = ("aten._assert", "aten.sym_")
    expected = [call for call in calls_of(load(tmp_path / "own.jsonl")) if not call[0].startswith(checks)]
    actual = [call for call in calls_of(load(save(program, tmp_path / "a.pt2"))) if not call[0].startswith(checks)]
    assert actual == expected


def test_composite_operators_are_kept(tmp_path: Path) -> None:
    trace = load(save(exported(), tmp_path / "a.pt2"))
    assert trace.end is not None
    assert not trace.end.dropped
    assert {"aten.conv2d.default", "aten.linear.default", "aten.softmax.int"} <= set(trace.calls["op"])
    assert trace.header["converted_from"] == "pt2"
    assert trace.header["torch"] == torch.__version__
    for signature, results in results_of(trace):
        expected = [spec.shape for spec in leaves(signature.outputs) if isinstance(spec, TensorSpec)]
        actual = [tuple(item.shape) for item in leaves(results) if isinstance(item, torch.Tensor)]
        assert actual == expected, signature.op


def test_modules_and_lines_are_the_scopes_of_calls(tmp_path: Path) -> None:
    calls = load(save(exported(), tmp_path / "a.pt2")).calls.set_index("op")
    assert calls.loc["aten.conv2d.default", "module"] == "features.0"
    assert calls.loc["aten.linear.default", "module"] == "head"
    assert calls.loc["aten.cat.default", "module"] == ""
    assert calls.loc["aten.cat.default", "file"].endswith("test_pt2.py")
    assert calls.loc["aten.cat.default", "function"] == "forward"


def test_views_have_the_memory_of_their_base(tmp_path: Path) -> None:
    trace = load(save(exported(), tmp_path / "a.pt2"))
    rows = {row.op: list(trace.storages[row.first_storage :][: row.tensors]) for row in trace.calls.itertuples()}
    *_, joined = rows["aten.cat.default"]
    assert Counter(rows["aten.split_with_sizes.default"]) == {joined: 3}
    assert rows["aten.clamp.default"][0] == joined
    assert rows["aten.clamp.default"][1] not in rows["aten.cat.default"]
    assert rows["aten.transpose.int"][0] == rows["aten.linear.default"][-1]


class Gated(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = x.exp() + 1
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (y * x,))


def test_nested_graph_is_followed_if_it_runs_once(tmp_path: Path) -> None:
    program = torch.export.export(Gated(), (torch.randn(4, requires_grad=True),))
    trace = load(save(program, tmp_path / "a.pt2"))
    assert trace.end is not None
    operators = list(trace.calls["op"])
    assert (
        operators[:3] == ["aten.exp.default", "aten.add.Tensor", "aten.mul.Tensor"] or "aten.exp.default" in operators
    )
    assert [item.op for item in trace.end.dropped] == ["higher_order.cond"]
    rows = {row.op: list(trace.storages[row.first_storage :][: row.tensors]) for row in trace.calls.itertuples()}
    assert rows["aten.mul.Tensor"][0] == rows["aten.add.Tensor"][-1]


def test_data_dependent_sizes_are_minimal_and_reported(tmp_path: Path) -> None:
    class Selected(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.nonzero() * 2

    program = torch.export.export(Selected(), (torch.ones(4),))
    trace = load(save(program, tmp_path / "a.pt2"))
    (multiplied,) = (item for item in trace.signatures if item.op == "aten.mul.Tensor")
    assert any("dynamic sizes" in text for text in trace.header["defaults"])
    assert [spec.shape for spec in tensors(multiplied.args)] == [(2, 1)]


class Trap:
    """Object with code that would run if it were unpickled."""

    def __reduce__(self) -> Any:
        return (exec, ("raise SystemExit('it ran')",))


def test_weights_constants_and_inputs_are_not_unpickled(tmp_path: Path) -> None:
    path = save(exported(), tmp_path / "a.pt2")
    bad = pickle.dumps(Trap())
    with pytest.raises(SystemExit):
        pickle.loads(bad)
    expected = calls_of(load(path))
    rewrite(path, lambda name, content: content if PROGRAM.fullmatch(name) else bad)
    assert calls_of(load(path)) == expected


def rewrite(path: Path, change: Any) -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target:
        for name in source.namelist():
            target.writestr(name, change(name, source.read(name)))
    path.write_bytes(packed.getvalue())


def test_older_archive_layout_is_read(tmp_path: Path) -> None:
    """The layout is that of torch 2.6 and 2.7."""
    path = save(exported(), tmp_path / "a.pt2")
    with zipfile.ZipFile(path) as archive:
        (name,) = (name for name in archive.namelist() if PROGRAM.fullmatch(name))
        graph = archive.read(name)
    expected = calls_of(load(path))
    with zipfile.ZipFile(tmp_path / "old.pt2", "w") as archive:
        archive.writestr("version", "8.1")
        archive.writestr("serialized_exported_program.json", graph)
        archive.writestr("serialized_state_dict.pt", b"")
    assert calls_of(load(tmp_path / "old.pt2")) == expected


def test_archive_without_a_program_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.pt2", "w") as archive:
        archive.writestr("archive/data/aotinductor/model/model.so", b"")
    with pytest.raises(UserError, match=r"contains no exported program: write one with torch\.export\.save"):
        load(tmp_path / "a.pt2")


def test_oversized_graph_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.pt2", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/models/model.json", b"[" + b" " * (64 << 20) + b"]")
    with pytest.raises(UserError, match=r"is refused.*its graphs have more than"):
        load(tmp_path / "a.pt2")


def test_duplicate_graphs_in_an_archive_are_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.pt2", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("models/a.json", b"{}")
        archive.filelist += archive.infolist() * 1000
    with pytest.raises(UserError, match="two graphs of its archive have one name"):
        load(tmp_path / "a.pt2")


@pytest.mark.parametrize("kind", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_graph_with_unbounded_compression_is_refused(tmp_path: Path, kind: int) -> None:
    with zipfile.ZipFile(tmp_path / "a.pt2", "w", kind) as archive:
        archive.writestr("models/a.json", b"[" + b" " * (1 << 20) + b"]")
    with pytest.raises(UserError, match="compressed by a method"):
        load(tmp_path / "a.pt2")


@pytest.mark.parametrize(
    "change",
    [
        {"inputs": [{"name": "self", "arg": {"as_float": 10**400}}]},
        {"target": "torch.ops.higher_order.wrap", "inputs": 5},
        {"target": "torch.ops.higher_order.wrap", "outputs": 5},
        {"inputs": [{"name": "self", "arg": {"as_tensor": {"name": "many"}}}]},
    ],
)
def test_malformed_node_is_counted(tmp_path: Path, change: dict[str, Any]) -> None:
    graph = {"nodes": [], "inputs": [], "outputs": []}
    node = {"target": "torch.ops.aten.relu.default", "inputs": [{"arg": {"as_graph": {"graph": graph}}}], "outputs": []}
    steps = [{"as_int": 1}] * 65
    many = {"dtype": 7, "sizes": steps, "strides": steps, "layout": 7, "device": {"type": "cpu"}}
    program = {"graph_module": {"graph": {**graph, "nodes": [node | change], "tensor_values": {"many": many}}}}
    with zipfile.ZipFile(tmp_path / "a.pt2", "w") as archive:
        archive.writestr("models/a.json", json.dumps(program))
    trace = load(tmp_path / "a.pt2")
    assert trace.end is not None
    assert [item.count for item in trace.end.dropped] == [1]


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')",
        "s0**-1",
        "2**9999999",
        "9**s0**s0",
        "s0/3",
        "(" * 500,
        "9" * 3000,
        "s0.x",
        "s9",
        "s0 - 9",
        "s0//0",
        "1.5",
    ],
)
def test_size_expressions_are_not_evaluated_as_python(text: str) -> None:
    with pytest.raises(ValueError, match="a size"):
        size_of(text, {"s0": 4})


def test_size_expressions_are_computed() -> None:
    assert size_of("2*s0 + (s1//3) - Mod(s0, 3)", {"s0": 4, "s1": 10}) == 10
    assert size_of("s0**3 + s0/2", {"s0": 4}) == 66
    assert size_of("Max(1, FloorDiv(s0 - 7, 2) + 1)", {"s0": 4}) == 1
    assert size_of("Add(Mul(Integer(2), Symbol('s0', integer=True)), Integer(-1))", {"s0": 4}) == 7


def program_json() -> Any:
    """Return the graph of an exported program as its file has it, without what the reader does not use."""
    packed = io.BytesIO()
    torch.export.save(exported(True), packed)
    with zipfile.ZipFile(packed) as archive:
        (name,) = (name for name in archive.namelist() if PROGRAM.fullmatch(name))
        program = json.loads(archive.read(name))
    graph = program["graph_module"]["graph"]
    for node in graph["nodes"]:
        node["metadata"].pop("from_node", None)
        node["metadata"].pop("stack_trace", None)
    return {"graph_module": {"graph": graph}, "range_constraints": program["range_constraints"]}


def test_values_of_other_types_are_counted(tmp_path: Path) -> None:
    program = program_json()
    nodes = program["graph_module"]["graph"]["nodes"]
    count = len(nodes)
    changes: list[Any] = [
        None,
        7,
        [],
        {"target": 3},
        {"target": "torch.ops.aten.relu.default"},
        {"target": "torch.ops.aten.x.y"},
    ]
    nodes += [*changes, {**nodes[-1], "inputs": 3}, {**nodes[-1], "inputs": [{"name": "x", "arg": {"as_tensor": []}}]}]
    program["graph_module"]["graph"]["tensor_values"]["wrong"] = {"dtype": "x", "sizes": 4}
    with zipfile.ZipFile(tmp_path / "a.pt2", "w") as archive:
        archive.writestr("a/models/model.json", json.dumps(program))
    trace = load(tmp_path / "a.pt2")
    assert trace.end is not None
    assert sum(item.count for item in trace.end.dropped) == len(nodes) - count
