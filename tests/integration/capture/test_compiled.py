"""Captures of compiled regions, of operators that take functions, of exported programs and of GraphNet samples."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import ROOT, run_command, run_python
from torch import nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from opgrip.capture import Capture
from opgrip.capture.start import main
from opgrip.replay import replay
from opgrip.replay.cases.cases import make_cases
from opgrip.replay.operators.lookup import Unsupported, find_operator
from opgrip.traces import Trace, load
from opgrip.traces.schema.records import IN_GRAPH
from opgrip.traces.values.exact import Exact

X, W = torch.rand(8, 8), torch.rand(8, 8)


def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ w + 1).sum()


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Backend:
    def __init__(self) -> None:
        self.compiled = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.compiled += 1
        return graph


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("before", [False, True])
def test_compiled_function_is_recorded_and_remains_compiled(tmp_path: Path, fullgraph: bool, before: bool) -> None:
    backend = Backend()
    compiled = torch.compile(layer, backend=backend, fullgraph=fullgraph)
    if before:
        compiled(X, W)
    with Capture(tmp_path / "t.jsonl"):
        captured = compiled(X, W)
    trace = load(tmp_path / "t.jsonl", partial=False)
    assert trace.calls["op"].tolist() == ["aten.mm.default", "aten.add.Tensor", "aten.relu.default", "aten.sum.default"]
    assert backend.compiled == before
    assert torch.equal(compiled(X, W), captured)
    assert backend.compiled == 1
    compiled(X, W)
    assert backend.compiled == 1


COMPILES_LATE = """
import sys, torch
from opgrip.capture import Capture

def layer(x):
    return torch.relu(x + 1).sum()

graphs = []
with Capture("t.jsonl"):
    x = torch.ones(3)
    print("torch._dynamo" in sys.modules)
    compiled = torch.compile(layer, backend=lambda graph, inputs: graphs.append(graph) or graph)
    compiled(x)
    print(len(graphs))
compiled(x)
print(len(graphs), torch._dynamo.eval_frame._stance.stance)
"""


@pytest.mark.slow
def test_compiler_that_is_loaded_in_a_capture_runs_operators_until_its_end(tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text(COMPILES_LATE, encoding="utf-8")
    done = run_python("late.py", cwd=tmp_path, status=0, fresh=True)
    assert done.stdout.split() == ["False", "0", "1", "default"]
    calls = load(tmp_path / "t.jsonl", partial=False).calls
    assert calls["op"].tolist()[-3:] == ["aten.add.Tensor", "aten.relu.default", "aten.sum.default"]


@pytest.mark.slow
def test_opaque_region_is_one_call_with_its_kernels(tmp_path: Path) -> None:
    compiled = torch.compile(layer)
    with Capture(tmp_path / "t.jsonl", compiled="opaque"):
        first = compiled(X, W)
        second = compiled(X, W)
        X.sin()
    assert torch.equal(first, second)
    assert torch.allclose(first, layer(X, W))
    trace = load(tmp_path / "t.jsonl", partial=False)
    own = trace.calls[trace.calls["inside"].isna()]
    (region,) = (item for item in trace.signatures if item.kind == "compiled")
    assert region.op.startswith("torch.compile:cpp_fused_")
    assert "extern_kernels.mm" in region.op
    assert own["op"].tolist() == [region.op, region.op, "aten.sin.default"]
    inside = trace.calls[trace.calls["inside"] == region.op]
    assert set(inside["op"]) == {"aten.mm.out"}
    assert not trace.end.dropped  # type: ignore[union-attr]
    with pytest.raises(Unsupported, match="compiled region"):
        find_operator(region)


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(TorchDispatchMode, "ignore_compile_internals"), reason="torch 2.6 compiles at each call under a mode"
)
def test_compiled_program_remains_compiled_with_opaque_regions(tmp_path: Path) -> None:
    program = ROOT / "tests/support/models/compiled_programs.py"
    alone = run_python(program, cwd=tmp_path, status=0)
    assert alone.stdout.count('"unique_graphs"') == 7
    watched = run_command("opcapture", "--compiled", "opaque", "-o", "t.jsonl", "--", program, cwd=tmp_path)
    assert (watched.returncode, watched.stdout) == (0, alone.stdout), watched.stderr


@pytest.mark.slow
def test_compiled_module_is_recorded_by_region(tmp_path: Path) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU())
    with Capture(tmp_path / "t.jsonl", compiled="opaque"):
        compiled = torch.compile(net)
        for _ in range(3):
            compiled(X).sum().backward()
    calls = load(tmp_path / "t.jsonl", partial=False).calls
    regions = calls[calls["kind"] == "compiled"]
    assert regions["phase"].value_counts().to_dict() == {"forward": 3, "backward": 3}


def traced_operators() -> list[list[str]]:
    x, y = torch.ones(1, 3, 8, 8), torch.ones(2, 3, 8)
    conv = torch.nn.Conv2d(3, 3, 3)
    graphs = [
        torch.jit.trace(conv, x, check_trace=False).inlined_graph,
        torch.jit.trace(lambda z: torch.conv2d(z, z), x).graph,
        torch.jit._get_trace_graph(conv, x)[0],
        torch.jit._get_trace_graph(torch.nn.Linear(8, 8), y)[0],
    ]
    return [[node.kind() for node in graph.nodes() if node.kind() != "prim::Constant"] for graph in graphs]


def test_graphs_are_read_in_a_capture_as_without_one(tmp_path: Path) -> None:
    def read() -> list[str]:
        traced = torch.jit.trace(lambda x: x.view(x.shape[0] * 2, -1) * (x.shape[0] * 0.5), torch.ones(2, 4))
        attention = torch.jit.trace(torch.nn.MultiheadAttention(8, 2).eval(), (torch.ones(2, 3, 8),) * 3)
        graphs = [traced.code, traced.graph, attention.inlined_graph, torch.jit.freeze(attention).graph]
        # each class of a module gets another name
        return [re.sub(r"___torch_mangle_\d+\.", "", str(graph)) for graph in graphs]

    torch.manual_seed(0)
    plain = read()
    torch.manual_seed(0)
    with Capture(tmp_path / "t.jsonl"):
        assert read() == plain
    end = load(tmp_path / "t.jsonl", partial=False).end
    assert end is not None
    assert {item.reason for item in end.without_work} == {IN_GRAPH}


def test_traced_graphs_are_as_without_a_capture(tmp_path: Path) -> None:
    plain = traced_operators()
    with Capture(tmp_path / "t.jsonl") as capture:
        assert traced_operators() == plain
        torch.ones(3).sin()
    trace = load(tmp_path / "t.jsonl", partial=False)
    assert trace.end is not None
    assert [item.op for item in trace.end.dropped] == ["torch.jit.trace"]
    assert capture.dropped >= len(plain)
    assert trace.calls["op"].iloc[-1] == "aten.sin.default"


MATRIX = torch.linspace(0.1, 1, 12).reshape(4, 3)


def branches() -> Any:
    return torch.cond(MATRIX.sum() > 1, lambda x: x.sin() + 1, lambda x: x.cos(), (MATRIX,))


def branches_with_gradients() -> Any:
    """Return the gradients of a branch's argument and of a variable that it closes over."""
    x, weight = MATRIX.clone().requires_grad_(), torch.full((3,), 2.0, requires_grad=True)
    result = torch.cond(x.sum() > 1, lambda x: x.sin() * weight, lambda x: x.cos(), (x,))
    result.sum().backward()
    return result, x.grad, weight.grad


def loop() -> Any:
    from torch._higher_order_ops.while_loop import while_loop

    return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x.sin()), (torch.tensor(0), MATRIX))


def scanned() -> Any:
    from torch._higher_order_ops.scan import scan

    return scan(lambda carry, x: (carry + x, carry * x), torch.zeros(3), MATRIX)


def mapped() -> Any:
    from functorch.experimental.control_flow import map as map_rows

    return map_rows(lambda x, y: x.sin() + y, MATRIX, torch.ones(3))


def attention() -> Any:
    query, key, value = MATRIX.repeat(4, 1)[None, None].repeat(3, 2, 1, 1)[:, None]
    return flex_attention(query, key, value, score_mod=lambda score, b, h, i, j: score + (i - j))


PROGRAMS: list[tuple[Callable[[], Any], str, set[str]]] = [
    (branches_with_gradients, "cond", {"sin", "cos", "mul"}),
    (scanned, "scan", {"add", "mul", "select"}),
    (branches, "cond", {"sin", "add"}),
    (loop, "while_loop", {"lt", "add", "sin"}),
    (mapped, "map_impl", {"sin", "add", "stack"}),
    (attention, "flex_attention", {"sub", "add", "matmul", "_safe_softmax"}),
]
CASES = [
    # torch takes a second to compile each case
    pytest.param(*case, compiled, marks=pytest.mark.slow if compiled == "opaque" or place > 1 else ())
    for compiled in ("operators", "opaque")
    for place, case in enumerate(PROGRAMS)
]


def captured(program: Callable[[], Any], path: Path, **options: Any) -> tuple[Any, Trace]:
    with Capture(path, **options) as capture:
        result = program()
    assert capture.dropped == 0
    return result, load(path, partial=False)


def equal(actual: Any, expected: Any) -> bool:
    pairs = zip(tree_leaves(actual), tree_leaves(expected), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize(("program", "name", "inner", "compiled"), CASES)
def test_operators_inside_are_recorded_and_results_are_equal(
    tmp_path: Path, program: Callable[[], Any], name: str, inner: set[str], compiled: str
) -> None:
    expected = program()
    actual, trace = captured(program, tmp_path / "t.jsonl", compiled=compiled)
    assert equal(actual, expected)
    calls = trace.calls
    outer = f"torch.ops.higher_order:{name}"
    inside = calls[calls["inside"] == outer]
    assert inner <= {op.split(".")[1] for op in inside["op"]}
    assert inside["gripped"].all()
    assert not inside["file"].str.contains("<").any()
    assert (calls["op"] == outer).sum() == (2 if program is branches_with_gradients else 1)
    # the outer call's time is attributed to its inner calls
    assert outer not in set(trace.own_calls["op"])
    assert set(inside["op"]) <= {case.op for case in make_cases(trace)}


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.cond(x.sum() > 0, lambda x: self.a(x).relu(), lambda x: self.b(x), (x,))
        return result


def test_inner_calls_have_the_module_and_line_of_the_outer_call(tmp_path: Path) -> None:
    model = nn.Sequential(Gate(), nn.Linear(3, 1))

    def program() -> Any:
        model(MATRIX).sum().backward()
        return model[0].a.weight.grad

    expected = program().clone()
    model.zero_grad()
    actual, trace = captured(program, tmp_path / "t.jsonl", model=model)
    assert torch.equal(actual, expected)
    inside = trace.calls[trace.calls["inside"].notna()]
    forward = inside[inside["phase"] == "forward"]
    assert set(forward["module"]) == {"0"}
    assert set(forward["function"]) == {"Gate.forward"}
    assert (inside["phase"] == "backward").any()


def test_compiler_state_is_restored_afterwards(tmp_path: Path) -> None:
    compiled: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(1)
        return graph

    captured(branches_with_gradients, tmp_path / "t.jsonl")
    torch.compile(lambda x: x.sin() + 1, backend=backend)(MATRIX)
    assert compiled == [1]


def test_error_inside_reaches_the_program_and_the_scope_is_left(tmp_path: Path) -> None:
    def inverse(x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.inv(x).contiguous()

    def program() -> Any:
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"singular|inver"):
                torch.cond(
                    MATRIX.sum() > 1,
                    lambda x: torch.linalg.inv(x).contiguous(),
                    lambda x: x.clone(),
                    (torch.zeros(3, 3),),
                )
        return MATRIX + 1

    with Capture(tmp_path / "t.jsonl"):
        program()
    trace = load(tmp_path / "t.jsonl")
    last = trace.calls[trace.calls["op"] == "aten.add.Tensor"]
    assert last["inside"].isna().all()


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, words: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.head(self.words(words)).clamp(max=1.5) * scale, -1)


def save(path: Path, with_inputs: bool = True) -> Path:
    program = torch.export.export(Words(), (torch.tensor([7, 9, 3]),), {"scale": torch.ones(1)})
    if not with_inputs:
        program.example_inputs = None
    torch.export.save(program, path)
    return path


def capture(source: object, folder: Path, *options: str) -> Path:
    trace = folder / "trace.jsonl"
    assert main(["--model", str(source), "-o", str(trace), "--steps", "1", "--warmup", "0", *options]) == 0
    return trace


@pytest.mark.parametrize("run", ["predict", pytest.param("train", marks=pytest.mark.slow)])
def test_exported_program_is_recorded_with_values_and_times(run: str, tmp_path: Path) -> None:
    trace = load(path := capture(save(tmp_path / "words.pt2"), tmp_path, "--run", run))
    operators = set(trace.calls["op"])
    assert {"aten.embedding.default", "aten.addmm.default", "aten._softmax.default"} <= operators
    assert ("aten.embedding_dense_backward.default" in operators) == (run == "train")
    assert (trace.calls["duration_ns"] > 0).all()
    (embedding,) = (item for item in trace.signatures if item.op == "aten.embedding.default")
    assert trace.values[embedding.args[1].values] == Exact([7, 9, 3])
    assert trace.header["model"]["name"] == "words"
    assert {row.status for row in replay(path, iterations=1)} == {"ok"}


def test_inputs_that_the_file_lacks_are_made_from_its_placeholders(tmp_path: Path) -> None:
    trace = load(capture(save(tmp_path / "words.pt2", with_inputs=False), tmp_path))
    (embedding,) = (item for item in trace.signatures if item.op == "aten.embedding.default")
    assert embedding.args[1].shape == (3,)


MODEL = """\
import torch

from torch import device


class GraphModule(torch.nn.Module):
    def forward(self, L_x_ : torch.Tensor, L_w_ : torch.nn.Parameter, L_ids_ : torch.Tensor, s1 : torch.SymInt):
        l_x_ = L_x_
        out = torch.conv2d(l_x_, L_w_, None, (1, 1), (1, 1), (1, 1), 1);  l_x_ = L_w_ = None
        out += 1;  out_1 = out;  out = None
        flat = out_1.flatten(2)[(Ellipsis, slice(None, s1, None))];  out_1 = None
        table = torch.arange(4, device=device(type='cuda', index=0)).view(1, 4)
        rows = flat[(slice(None, None, None), L_ids_)];  L_ids_ = None
        return (rows + table.to('cuda:0'), flat)
"""


def meta(name: str, shape: list[int], **facts: Any) -> str:
    facts = {"name": name, "shape": shape, "dtype": "torch.float32", "device": "cuda:0", **facts}
    return f"class Program_weight_tensor_meta_{name}:\n" + "".join(f"\t{key} = {facts[key]!r}\n" for key in facts)


WEIGHTS = (
    meta("L_x_", [2, 3, 8, 8], mean=0.5, std=0.1, data=None)
    + meta("L_w_", [4, 3, 3, 3], mean=1.0, std=0.0, data=None)
    + meta("L_ids_", [3], dtype="torch.int64", mean=None, std=None, min_val=2, max_val=2)
    + meta("s1", [], dtype="torch.int64", device="cpu", data=[4])
)


def sample(folder: Path, **files: str) -> Path:
    folder.mkdir()
    files = {"model": MODEL, "weight_meta": WEIGHTS, "input_meta": "", **files}
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    (folder / "graph_net.json").write_text(json.dumps({"framework": "torch", "model_name": "small"}))
    return folder


@pytest.mark.parametrize("run", ["predict", pytest.param("train", marks=pytest.mark.slow)])
def test_graphnet_sample_is_recorded_with_values_and_times(run: str, tmp_path: Path) -> None:
    trace = load(path := capture(sample(tmp_path / "small"), tmp_path, "--run", run))
    signatures = {item.op: item for item in trace.signatures}
    image, weight = (trace.values[tensor.values] for tensor in signatures["aten.convolution.default"].args[:2])
    assert (image.mean, image.std) == (pytest.approx(0.5, abs=0.02), pytest.approx(0.1, abs=0.02))
    assert weight.value == 1.0
    assert trace.values[signatures["aten.index.Tensor"].args[1][1].values] == Exact([2, 2, 2])
    assert "aten.slice.Tensor" in signatures
    assert ("aten.convolution_backward.default" in signatures) == (run == "train")
    assert (trace.calls["duration_ns"] > 0).all()
    convolution = trace.calls[trace.calls["op"] == "aten.convolution.default"].iloc[0]
    assert (convolution["file"], convolution["line"]) == ("model.py", 9)
    assert {row.status for row in replay(path, iterations=1)} == {"ok"}


@pytest.mark.parametrize(
    ("name", "files", "words"),
    [
        ("small", {"model": ""}, "defines no GraphModule"),
        ("small", {"model": "import missing_package"}, "model.py fails when it is run at model.py:1"),
        ("small", {"weight_meta": WEIGHTS.replace("float32", "float33")}, "describes the tensor L_x_ wrongly"),
        ("small", {"graph_net": '{"framework": "paddle"}'}, "is a sample for paddle"),
        ("", {}, "is not a GraphNet sample: it has no model.py"),
        ("foreign.pt2", {}, "is not a program that torch.export can load"),
        ("foreign.pt2 --batch-size 2", {}, "--batch-size does not apply"),
    ],
)
def test_damaged_or_foreign_graph_is_refused_in_one_line(
    name: str, files: dict[str, str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "foreign.pt2").write_bytes(b"PK no archive")
    folder = sample(tmp_path / "small", **{key: text for key, text in files.items() if key != "graph_net"})
    if "graph_net" in files:
        (folder / "graph_net.json").write_text(files["graph_net"])
    path, *options = name.split(" ")
    assert main(["--model", str(tmp_path / path), "-o", str(tmp_path / "trace.jsonl"), *options]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("error:") == 1
    assert "Traceback" not in error
