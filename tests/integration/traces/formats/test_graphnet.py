"""Tests of reading GraphNet's samples as traces, and of reading programs as syntax trees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_data import results_of

from opgrip.errors import UserError
from opgrip.replay import replay
from opgrip.traces import Trace, TraceReader, load
from opgrip.traces.formats.configurations.modules import MetaRecording
from opgrip.traces.formats.tensor_programs import TensorProgram, Unconverted
from opgrip.traces.schema.arguments import TensorSpec
from opgrip.traces.values.exact import Constant, Exact
from opgrip.traces.values.floats import Floats

MODEL = """\
import torch

from torch import device


class GraphModule(torch.nn.Module):
    def forward(self, L_x_: torch.Tensor, L_w_: torch.nn.parameter.Parameter, L_ids_: torch.Tensor):
        l_x_ = L_x_
        out = torch.conv2d(l_x_, L_w_, None, (1, 1), (1, 1), (1, 1), 1);  l_x_ = L_w_ = None
        out += 1;  out_1 = out;  out = None
        x = torch.nn.functional.relu(out_1, inplace = True);  out_1 = None
        first = x[(slice(None, None, None), 0)]
        flat = first.flatten(1);  first = None
        table = torch.arange(64, device=device(type='cuda', index=0)).view(1, 64)
        rows = flat[(0, L_ids_)]
        size = flat.size(1) // 2 + table.shape[-1]
        parts = flat.split(size, dim=1)
        part = parts[0];  parts = None
        return (part @ part.transpose(-2, -1), rows)
"""


def meta(name: str, shape: list[int], **facts: Any) -> str:
    facts = {"name": name, "shape": shape, "dtype": "torch.float32", "device": "cuda:0", **facts}
    lines = "".join(
        f"\t{key} = {repr(value) if key != 'name' else chr(34) + name + chr(34)}\n" for key, value in facts.items()
    )
    return f"class Program_weight_tensor_meta_{name}:\n{lines.replace(chr(39), chr(34))}\n"


WEIGHTS = (
    meta("L_x_", [2, 3, 8, 8], mean=0.5, std=2.0, data=None)
    + meta("L_w_", [4, 3, 3, 3], mean=1.0, std=0.0, data=None)
    + meta("L_ids_", [3], dtype="torch.int64", mean=None, std=None, data=[5, 0, 7])
)


def sample(folder: Path, model: str = MODEL, weights: str = WEIGHTS) -> Path:
    folder.mkdir(parents=True)
    (folder / "model.py").write_text(model)
    (folder / "weight_meta.py").write_text(weights)
    return folder


def trace_of(path: Path) -> tuple[Trace, TraceReader]:
    reader = TraceReader(path)
    return load(path, reader=reader), reader


def test_operators_of_the_graph_are_its_calls(tmp_path: Path) -> None:
    trace, reader = trace_of(sample(tmp_path / "a"))
    assert not reader.losses.skipped
    ops = [op.removeprefix("aten.") for op in trace.calls["op"]]
    kernels = [op for op in ops if op in {"convolution.default", "add_.Tensor", "relu_.default", "mm.default"}]
    assert kernels == ["convolution.default", "add_.Tensor", "relu_.default", "mm.default"]
    assert "index.Tensor" in ops
    assert trace.calls["file"].iloc[0] == "a/model.py"
    for signature, result in results_of(trace):
        assert result is not None, signature.op
    assert {row.status for row in replay(tmp_path / "a", device="cpu", iterations=1)} == {"ok"}


def test_values_are_read_from_the_file(tmp_path: Path) -> None:
    trace, _ = trace_of(sample(tmp_path / "a"))
    convolution = next(item for item in trace.signatures if item.op == "aten.convolution.default")
    x, weight = (trace.values[tensor.values] for tensor in convolution.args[:2])
    assert isinstance(x, Floats)
    assert (x.mean, x.std, weight) == (0.5, 2.0, Constant(1.0))
    index = next(item for item in trace.signatures if item.op == "aten.index.Tensor")
    ids = next(leaf for leaf in index.args[1] if isinstance(leaf, TensorSpec))
    assert trace.values[ids.values] == Exact([5, 0, 7])


def test_files_and_folders_of_graphs_are_samples(tmp_path: Path) -> None:
    one, _ = trace_of(sample(tmp_path / "a" / "subgraph_0") / "model.py")
    sample(tmp_path / "a" / "subgraph_1")
    both, _ = trace_of(tmp_path / "a")
    assert len(both.calls) == 2 * len(one.calls)
    assert set(both.calls["file"]) == {"subgraph_0/model.py", "subgraph_1/model.py"}


def test_unconverted_statements_are_counted_and_the_others_read(tmp_path: Path) -> None:
    body = """\
class GraphModule(torch.nn.Module):
    def forward(self, L_x_, L_none_):
        a = L_x_.item()
        b = torch.full((2,), a)
        c = b + 1
        d = L_none_ * 2
        e = __import__('os').system('true')
        f = L_x_.relu()
        enter = torch.amp.autocast_mode._enter_autocast('cuda', torch.bfloat16, True, False)
        g = L_x_.relu()
"""
    trace, reader = trace_of(sample(tmp_path / "a", body))
    assert trace.calls["op"].tolist() == ["aten.relu.default"]
    reasons = dict([*reader.losses.skipped])
    assert reasons["torch.full"] == "it needs the result of L_x_.item"
    assert "it needs the result of L_x_.item" in {reason for op, reason in reader.losses.skipped if op == "Assign"}
    assert any("input L_none_" in reason for reason in reasons.values())
    assert "not a function of tensors" in reasons["__import__('os').system"]
    assert any("autocast" in reason for reason in reasons.values())


@pytest.mark.parametrize("text", ["", "class GraphModule(torch.nn.Module):\n    def forward(:", "x = 1\n", "[" * 5000])
def test_text_without_a_graph_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        trace_of(sample(tmp_path / "a", text))


def calls_of(body: str, **arguments: Any) -> list[Any]:
    names = ", ".join(arguments) or "x"
    arguments = arguments or {"x": TensorSpec((4, 6), (6, 1), torch.float32, "cpu")}
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    program = TensorProgram(
        f"import torch\nimport torch.nn.functional as F\ndef run({names}):\n{lines}\n", MetaRecording("cpu")
    )
    return [
        item.op if not isinstance(item, Unconverted) else item.reason for _, item in program.calls("run", arguments)
    ]


@pytest.mark.parametrize(
    ("body", "ops"),
    [
        ("return F.silu(x)", ["aten.silu.default"]),
        ("for i in range(3):\n    x = x.relu()\nreturn x", ["aten.relu.default"] * 3),
        ("if x.shape[0] > 2:\n    return x.relu()\nreturn x.tanh()", ["aten.relu.default"]),
        ("y = [row.exp() for row in x]\nreturn torch.stack(y)", None),
        ("x[0] = x[1]", ["aten.copy_.default"]),
        ("m, i = torch.max(x, dim=1)\nreturn torch.max(x, dim=1).values", ["aten.max.dim"] * 2),
        (
            "return F.scaled_dot_product_attention(x[None], x[None], x[None])",
            ["aten.scaled_dot_product_attention.default"],
        ),
        ("with torch.no_grad():\n    return x.relu()", ["aten.relu.default"]),
        ("return torch.linalg.vector_norm(x)", ["aten.linalg_vector_norm.default"]),
        ("return torch.ops.aten.relu.default(x)", ["aten.relu.default"]),
        ("return torch.zeros(1 << 40, dtype=x.dtype)", ["aten.zeros.default"]),
    ],
)
def test_tensor_statements_are_interpreted(body: str, ops: list[str] | None) -> None:
    found = calls_of(body)
    if ops is None:
        assert found.count("aten.exp.default") == 4
    else:
        views = {"aten.select.int", "aten.unsqueeze.default", "aten.lift_fresh.default"}
        assert [op for op in found if op not in views] == ops


def test_functions_of_the_program_are_followed() -> None:
    text = "import torch\nEPS = 1e-6\ndef norm(x, eps=EPS):\n    return x * torch.rsqrt(x.pow(2).mean(-1) + eps)\n"
    program = TensorProgram(text + "def run(x):\n    return norm(x).relu()\n", MetaRecording("cpu"))
    arguments = {"x": TensorSpec((4,), (1,), torch.float32, "cpu")}
    ops = [call.op for _, call in program.calls("run", arguments)]
    assert ops[-2:] == ["aten.mul.Tensor", "aten.relu.default"]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("return 10 ** 10 ** 10", "64 bits"),
        ("return 1 << 1000000000", "64 bits"),
        ("return [0] * 10 ** 9", "the operator mul of list, int"),
        ("return 'a' * 10 ** 9", "the operator mul of str, int"),
        ("return list(range(10 ** 9))", "a loop of more than"),
        ("for i in range(99999):\n    for j in range(99999):\n        k = i + j", "more than 500,000 expressions"),
        ("return torch.from_file('/etc/passwd', size=1)", "not a function of tensors"),
        ("return torch.load('/etc/passwd')", "not a function of tensors"),
        ("return open('/etc/passwd')", "not a function of tensors"),
        ("return eval('1')", "not a function of tensors"),
        ("return x.__class__.__base__", "unsupported attribute"),
        ("return (lambda: 1)()", "unsupported expression"),
        ("return f'{x}'", "unsupported expression"),
        ("return run(x)", "nested more than 50 levels deep"),
        ("return x[0, 0].item()", "meta"),
        ("while True:\n    pass", "unsupported statement"),
        ("return x.split(1 << 40)[0].expand(1 << 40).split(1)", "pieces|expand"),
    ],
)
def test_unsupported_statement_has_a_reason_and_no_effect(body: str, reason: str) -> None:
    *_, last_reason = calls_of(body)
    assert any(word in last_reason for word in reason.split("|")), last_reason


def test_text_of_too_many_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="more than 400,000 words"):
        TensorProgram("1," * 300_000, MetaRecording("cpu"))
