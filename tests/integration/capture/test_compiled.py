"""Tests of captures of programs with compiled regions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import ROOT, run_command, run_python
from versions import leaves_compiled_code_under_modes

from opgrip.capture import Capture
from opgrip.replay.operators.lookup import Unsupported, find_operator
from opgrip.traces import load
from opgrip.traces.schema.records import IN_GRAPH

X, W = torch.rand(8, 8), torch.rand(8, 8)


def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ w + 1).sum()


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Backend:
    """Backend that counts its compilations."""

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
@pytest.mark.skipif(not leaves_compiled_code_under_modes(), reason="this torch compiles again under a mode")
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
