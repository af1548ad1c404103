"""Tests of reading ONNX models: exported by torch, and single nodes compared with onnx's own evaluation."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from foreign_data import operator_of, results_of
from optional import optional
from torch import nn

from opgrip.errors import UserError
from opgrip.traces import Trace, load
from opgrip.traces.formats.onnx_operators import TABLE
from opgrip.traces.formats.protobuf_files import with_length
from opgrip.traces.schema.arguments import leaves, map_leaves, tensors
from opgrip.traces.schema.records import Signature
from opgrip.traces.schema.tensor_specs import TensorSpec

onnx = optional("onnx")
optional("onnxscript")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402
from onnx_examples import NODES, UNTRIED  # noqa: E402


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(30, 16)
        self.norm = nn.LayerNorm(16)
        self.layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, activation="gelu")
        self.head = nn.Linear(16, 30)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.norm(self.words(words))))


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_exported_model_runs_by_its_nodes(exporter: str, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    export(Encoder().eval(), torch.randint(0, 30, (2, 12)), path, exporter)
    trace = load(path)
    assert trace.end is not None
    nodes = [node for node in onnx.load(path).graph.node if node.op_type != "Constant"]
    assert sum(item.count for item in trace.end.dropped) <= 0.05 * len(nodes)
    assert len(trace.calls) >= 0.95 * len(nodes)
    names = ("embedding", "native_layer_norm", "matmul", "gelu")
    assert set(trace.calls["op"]) >= {f"aten.{name}.default" for name in names}
    if exporter == "dynamo":
        assert set(trace.calls["module"]) >= {"words", "layer.self_attn", "head"}
    check_results(trace)


def export(model: nn.Module, example: torch.Tensor, path: Path, exporter: str) -> None:
    if exporter == "dynamo":
        torch.onnx.export(model, (example,), path, dynamo=True, external_data=False, verbose=False)
        return
    names: dict[str, Any] = {"input_names": ["x"], "dynamic_axes": {"x": {0: "batch"}}}
    torch.onnx.export(model, (example,), path, dynamo=False, **names)


def check_results(trace: Trace) -> None:
    for signature, results in results_of(trace):
        for actual, expected in zip(leaves(results), leaves(signature.outputs), strict=True):
            if isinstance(expected, TensorSpec):
                assert isinstance(actual, torch.Tensor)
                assert (tuple(actual.shape), actual.dtype) == (expected.shape, expected.dtype), signature.op


def test_dynamic_sizes_are_reported(tmp_path: Path) -> None:
    node = helper.make_node("Relu", ["x"], ["y"])
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3, "height"])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 3, "height"])
    trace = write([node], [x], [y], tmp_path)
    assert [spec.shape for spec in tensors(trace.signatures[0].args)] == [(1, 3, 64)]
    assert any("dynamic sizes" in text for text in trace.header["defaults"])


def test_dimension_of_size_zero_stays_empty(tmp_path: Path) -> None:
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 0, "width"]) for name in "xy")
    trace = write([helper.make_node("Relu", ["x"], ["y"])], [x], [y], tmp_path)
    assert [spec.shape for spec in tensors(trace.signatures[0].args)] == [(2, 0, 64)]


def test_model_without_nodes_is_refused_as_such(tmp_path: Path) -> None:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2])
    with pytest.raises(UserError, match="is an ONNX model without nodes"):
        write([], [x], [x], tmp_path)


def test_small_constants_keep_their_values_and_weights_do_not(tmp_path: Path) -> None:
    x, y = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in (("x", (9, 3)), ("y", (4, 3)))
    )
    index = numpy_helper.from_array(np.array([8, 0, -1, 3]), "index")
    trace = write([helper.make_node("Gather", ["x", "index"], ["y"], axis=0)], [x], [y], tmp_path, [index])
    (signature,) = trace.signatures
    assert signature.op == "aten.index_select.default"
    assert [trace.values[spec.values].data for spec in tensors(signature.args) if spec.values is not None] == [
        [8, 0, -1, 3]
    ]


def test_view_has_the_memory_of_its_base(tmp_path: Path) -> None:
    shape = numpy_helper.from_array(np.array([6]), "shape")
    nodes = [
        helper.make_node("Relu", ["x"], ["a"]),
        helper.make_node("Reshape", ["a", "shape"], ["b"]),
        helper.make_node("Add", ["b", "b"], ["y"]),
    ]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, size) for name, size in (("x", (2, 3)), ("y", (6,))))
    trace = write(nodes, [x], [y], tmp_path, [shape])
    numbers = [list(trace.storages[row.first_storage :][: row.tensors]) for row in trace.calls.itertuples()]
    (x_, a_), (view_of, view), (left, right, out) = numbers
    assert a_ == view_of == view == left == right
    assert len({x_, a_, out}) == 3


def write(
    nodes: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any], folder: Path, constants: Sequence[Any] = ()
) -> Trace:
    path = folder / "model.onnx"
    path.write_bytes(model_of(nodes, inputs, outputs, constants).SerializeToString())
    return load(path)


def model_of(nodes: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any], constants: Sequence[Any] = ()) -> Any:
    graph = helper.make_graph(nodes, "g", inputs, outputs, initializer=constants)
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=9)


def test_every_operator_of_the_table_is_tested() -> None:
    assert set(TABLE) == set(NODES) | set(UNTRIED)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("op", NODES)
def test_node_computes_what_onnx_specifies(op: str, tmp_path: Path) -> None:
    operands, attributes = NODES[op]
    names = [
        "" if isinstance(operand, tuple) and not operand else f"i{place}" for place, operand in enumerate(operands)
    ]
    values = {
        name: operand[0] if isinstance(operand, tuple) else operand
        for name, operand in zip(names, operands, strict=True)
        if name
    }
    constants = [
        numpy_helper.from_array(np.asarray(operand[0]), name)
        for name, operand in zip(names, operands, strict=True)
        if isinstance(operand, tuple) and operand
    ]
    count = 2 if op in ("Split", "TopK") else 1
    outputs = [f"o{place}" for place in range(count)]
    node = helper.make_node(op, names, outputs, **attributes)
    fixed = {constant.name for constant in constants}
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.asarray(value).dtype), np.shape(value))
        for name, value in values.items()
        if name not in fixed
    ]
    results = [helper.make_tensor_value_info(name, TensorProto.UNDEFINED, None) for name in outputs]
    for item in results:
        item.ClearField("type")
    model = model_of([node], inputs, results, constants)
    expected = ReferenceEvaluator(model).run(None, {name: value for name, value in values.items() if name not in fixed})

    trace = write([node], inputs, results, tmp_path, constants)
    assert trace.end is not None
    assert not trace.end.dropped
    actual = run_calls(trace, [torch.from_numpy(np.array(value)) for value in values.values()])
    # aten's pooling also returns indices
    assert [item.dtype for item in actual[len(expected) :]] == ([torch.int64] if op == "MaxPool" else [])
    for mine, theirs in zip(actual[: len(expected)], expected, strict=True):
        torch.testing.assert_close(mine.contiguous(), torch.from_numpy(np.array(theirs)), rtol=1e-4, atol=1e-5)


def run_calls(trace: Trace, operands: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the results of the last call, with a node's operands in the first storages."""
    memory = dict(enumerate(operands))
    signatures = {item.number: item for item in trace.signatures}
    results: list[Any] = []
    for row in trace.calls.itertuples():
        signature = signatures[row.signature]
        numbers = trace.storages[row.first_storage :][: row.tensors].tolist()
        takes = [memory[number] for number in numbers[: len(list(tensors([signature.args, signature.kwargs])))]]
        outputs = zip(leaves(call_by(signature, takes)), leaves(signature.outputs), strict=True)
        results = [item for item, spec in outputs if isinstance(spec, TensorSpec)]
        memory |= dict(zip(numbers[len(takes) :], (item.contiguous() for item in results), strict=True))
    return results


def call_by(signature: Signature, operands: list[torch.Tensor]) -> Any:
    remaining = iter(operands)

    def make(leaf: Any) -> Any:
        return next(remaining).as_strided(leaf.shape, leaf.stride) if isinstance(leaf, TensorSpec) else leaf

    args, kwargs = map_leaves(make, signature.args), map_leaves(make, signature.kwargs)
    return operator_of(signature)(*args, **kwargs)


def test_node_without_an_operator_is_named_with_the_reason(tmp_path: Path) -> None:
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, (2, 4)) for name in "xy")
    nodes = [
        helper.make_node("Hardmax", ["x"], ["a"]),
        helper.make_node("FusedGelu", ["x"], ["b"], domain="com.microsoft"),
        helper.make_node("Relu", ["b"], ["y"]),
        helper.make_node("Relu", ["x"], ["z"]),
    ]
    trace = write(nodes, [x], [y], tmp_path)
    assert trace.end is not None
    assert {item.op: item.reason for item in trace.end.dropped} == {
        "Hardmax": "no aten operator for it",
        "com.microsoft::FusedGelu": "no aten operator for it",
        "Relu": "onnx cannot infer the shape of one of its inputs",
    }
    assert list(trace.calls["op"]) == ["aten.relu.default"]


@pytest.mark.parametrize("sizes", [[1 << 40, 1 << 40], [-1], [1 << 62, 4]])
def test_sizes_beyond_memory_allocate_nothing(sizes: list[int], tmp_path: Path) -> None:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, (2,))
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    shape = numpy_helper.from_array(np.array(sizes), "shape")
    nodes = [helper.make_node("ConstantOfShape", ["shape"], ["a"]), helper.make_node("Add", ["a", "x"], ["y"])]
    trace = write(nodes, [x], [y], tmp_path, [shape])
    assert trace.end is not None
    assert len(trace.calls) + sum(item.count for item in trace.end.dropped) == 2


def test_doubling_dimensions_allocate_nothing(tmp_path: Path) -> None:
    nodes = [helper.make_node("Gather", [f"x{place}"] * 2, [f"x{place + 1}"]) for place in range(34)]
    start = helper.make_tensor_value_info("x0", TensorProto.INT64, [2, 2])
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(helper.make_graph(nodes, "g", [start], [])), path)
    script = (
        "import resource, sys; from opgrip.traces import load; load(sys.argv[1]); import onnx, torch;"
        "taken = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize();"
        "resource.setrlimit(resource.RLIMIT_AS, (taken + (1 << 29),) * 2); print(len(load(sys.argv[2]).calls))"
    )
    small = tmp_path / "small.onnx"
    onnx.save(helper.make_model(helper.make_graph(nodes[:1], "g", [start], [])), small)
    done = subprocess.run([sys.executable, "-c", script, small, path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-500:]
    assert 4 <= int(done.stdout) <= 7


def test_tensors_with_too_many_dimensions_are_named(tmp_path: Path) -> None:
    node = helper.make_node("Relu", ["x"], ["y"])
    start = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1] * 65)
    onnx.save(helper.make_model(helper.make_graph([node], "g", [start], [])), tmp_path / "m.onnx")
    trace = load(tmp_path / "m.onnx")
    assert trace.end is not None
    assert [item.reason for item in trace.end.dropped] == ["onnx cannot infer the shape of one of its inputs"]


def functions_of(bodies: dict[str, list[Any]], first: str) -> Any:
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    functions = [helper.make_function("own", name, ["a"], ["b"], body, imports) for name, body in bodies.items()]
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3])
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph([helper.make_node(first, ["x"], ["y"], domain="own")], "g", [value], [result])
    return helper.make_model(graph, functions=functions, opset_imports=imports)


def chained(op: str, times: int) -> list[Any]:
    names = ["a", *(f"t{place}" for place in range(times - 1)), "b"]
    return [helper.make_node(op, [names[at]], [names[at + 1]], domain="own") for at in range(times)]


def test_functions_of_the_model_are_followed(tmp_path: Path) -> None:
    inner = [helper.make_node("Relu", ["a"], ["t"]), helper.make_node("Exp", ["t"], ["b"])]
    onnx.save(functions_of({"Inner": inner, "Outer": chained("Inner", 2)}, "Outer"), tmp_path / "a.onnx")
    trace = load(tmp_path / "a.onnx")
    assert list(trace.calls["op"]) == ["aten.relu.default", "aten.exp.default"] * 2
    assert trace.end is not None
    assert not trace.end.dropped


@pytest.mark.parametrize(
    ("bodies", "reason"),
    [
        ({"F0": chained("F0", 1)}, "calls itself"),
        ({"F0": chained("F1", 1), "F1": chained("F0", 1)}, "calls itself"),
        (
            {f"F{at}": chained(f"F{at + 1}", 2) for at in range(40)}
            | {"F40": [helper.make_node("Relu", ["a"], ["b"])]},
            "more than 1,000,000 nodes",
        ),
    ],
    ids=["itself", "each other", "doubling"],
)
def test_recursive_functions_are_not_followed(bodies: dict[str, list[Any]], reason: str, tmp_path: Path) -> None:
    onnx.save(functions_of(bodies, "F0"), tmp_path / "a.onnx")
    trace = load(tmp_path / "a.onnx")
    assert reason in "".join(trace.header["defaults"])
    assert trace.end is not None
    assert [(item.op, item.reason) for item in trace.end.dropped] == [("own::F0", "no aten operator for it")]


@pytest.mark.parametrize("field", [1, 5], ids=["nodes", "initializers"])
def test_model_of_a_million_empty_parts_is_refused_early(field: int, tmp_path: Path) -> None:
    part = bytes([field << 3 | 2, 0])
    path = tmp_path / "model.onnx"
    # the version, then the graph
    path.write_bytes(b"\x08\x09\x3a" + with_length(part * (1 << 20)))
    with pytest.raises(UserError, match="more than 1,048,576 fields"):
        load(path)
