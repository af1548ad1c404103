"""Tests of calls written as Python files that need only torch."""

import ast
import math
import re
import runpy
import sys
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import refusal, run_python, succeed
from unusual_tensors import UNUSUAL

from opgrip.capture import Capture
from opgrip.errors import UserError
from opgrip.replay.cases.cases import Case, make_cases
from opgrip.tools.exports.exported_cases import export_case, export_unit, source_of
from opgrip.traces import Trace, load
from opgrip.traces.schema.arguments import TensorSpec
from opgrip.traces.schema.records import Signature
from opgrip.traces.scripts.script import script_of
from opgrip.traces.values import ValueModel, fit

ALONE = {"argparse", "base64", "collections", "math", "runpy", "statistics", "time", "zlib", "torch"}


def check_source(source: str) -> None:
    source.encode("ascii")
    imported = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert {name.name for node in imported for name in node.names} <= ALONE


def run_script(source: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    path.write_text(source)
    monkeypatch.setattr(sys, "argv", [str(path), "--repeats", "0"])
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    try:
        return runpy.run_path(str(path), run_name="__main__")
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)


def run_all(trace: Trace, cases: Collection[Case], folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    refused: list[str] = []
    for case in cases:
        try:
            source = source_of(trace, case)
        except UserError as error:
            refused.append(str(error))
            continue
        check_source(source)
        run_script(source, folder / "case.py", monkeypatch)
    return refused


def test_every_case_of_a_training_step_runs_as_a_script(
    tiny_trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = load(tiny_trace)
    cases = make_cases(trace)
    assert len(cases) > 50
    assert run_all(trace, cases, tmp_path, monkeypatch) == []


def exported(path: Path, run: Callable[[], object], op: str) -> str:
    with Capture(path):
        run()
    trace = load(path)
    number = next(item.number for item in trace.signatures if item.op == op)
    return export_case(trace, number)


LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "transposed": lambda: torch.randn(6, 40).t(),
    "slice": lambda: torch.randn(10, 30)[2:, 3:20],
    "expanded": lambda: torch.randn(70, 1).expand(70, 5),
    "windows": lambda: torch.randn(200).unfold(0, 5, 2),
    "no dimensions": lambda: torch.tensor(3.5),
    "empty": lambda: torch.empty(0, 4),
    "whole numbers": lambda: torch.randint(-5, 900, (30_000,)),
    "true and false": lambda: torch.rand(300) > 0.3,
    "strange numbers": lambda: torch.tensor([math.nan, math.inf, -math.inf, -0.0, 1e-45]),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_script_recreates_tensor_metadata(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = LAYOUTS[name]()
    source = exported(tmp_path / "t.jsonl", lambda: torch.ops.aten.clone(tensor), "aten.clone.default")
    check_source(source)
    script = run_script(source, tmp_path / "case.py", monkeypatch)
    (again,), _ = script["make_inputs"]("cpu")
    facts = ("shape", "dtype", "device", "requires_grad")
    assert [getattr(again, fact) for fact in facts] == [getattr(tensor, fact) for fact in facts]
    assert (again.stride(), again.storage_offset()) == (tensor.stride(), tensor.storage_offset())
    assert (again.is_conj(), again.is_neg()) == (tensor.is_conj(), tensor.is_neg())
    if tensor.numel() <= 64:
        assert torch.equal(again.nan_to_num(7), tensor.nan_to_num(7))
    elif tensor.dtype == torch.bool:
        assert again.sum() == tensor.sum()


def test_script_arguments_share_memory_as_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(10, 20)
    source = exported(tmp_path / "t.jsonl", lambda: x[2:].mul_(x[:-2].flip(0)[:1]), "aten.mul_.Tensor")
    run_script(source, tmp_path / "case.py", monkeypatch)
    source = exported(tmp_path / "u.jsonl", lambda: torch.add(x[1:], x[:-1], alpha=2), "aten.add.Tensor")
    script = run_script(source, tmp_path / "case.py", monkeypatch)
    (one, other), named = script["make_inputs"]("cpu")
    assert one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    assert one.storage_offset() - other.storage_offset() == 20
    assert named == {"alpha": 2}


VALUES_DECIDE: dict[str, Callable[[torch.Tensor], object]] = {
    "aten.nonzero.default": lambda x: torch.nonzero(x > 0.5),
    "aten.masked_select.default": lambda x: torch.masked_select(x, x > 1),
    "aten._unique2.default": lambda x: (x * 10).long().unique(),
    "aten.repeat_interleave.Tensor": lambda x: x[:, 0].repeat_interleave(torch.arange(len(x)) % 4),
    "aten.embedding.default": lambda x: torch.nn.functional.embedding(torch.randint(0, len(x), (5000,)), x),
}


@pytest.mark.parametrize("op", VALUES_DECIDE)
def test_script_results_have_the_recorded_shapes(op: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(300, 12)
    source = exported(tmp_path / "t.jsonl", lambda: VALUES_DECIDE[op](x), op)
    # otherwise the script would not check the results
    assert "RESULTS = [" in source
    run_script(source, tmp_path / "case.py", monkeypatch)


MODELS = {
    "normal": torch.randn(5000) * 3 + 1,
    "uniform": torch.rand(5000) - 7,
    "quantiles": torch.randn(5000).exp(),
    "zeros": torch.randn(5000).relu(),
    "whole numbers": torch.randint(0, 50_000, (60_000,)),
    "constant": torch.full((5000,), 2.5),
    "permutation": torch.randperm(50_000),
}


@pytest.mark.parametrize("name", MODELS)
def test_drawn_values_have_the_recorded_distribution(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = MODELS[name]
    model = fit(values)
    assert model is not None
    script = run_script(script_of(*_call(values, model)), tmp_path / "case.py", monkeypatch)
    (again,), _ = script["make_inputs"]("cpu")
    one, other = values.double(), again.double()
    assert float(other.mean()) == pytest.approx(float(one.mean()), abs=0.1 * float(one.std()) + 1e-9)
    assert float(other.std()) == pytest.approx(float(one.std()), rel=0.1, abs=1e-9)
    assert float((other == 0).double().mean()) == pytest.approx(float((one == 0).double().mean()), abs=0.01)
    assert one.min() <= other.min() <= other.max() <= one.max()
    assert bool((other.diff() >= 0).all()) == bool((one.diff() >= 0).all())


def _call(values: torch.Tensor, model: ValueModel) -> tuple[Signature, dict[int, ValueModel], dict[str, Any]]:
    spec = TensorSpec(tuple(values.shape), values.stride(), values.dtype, "cpu", values=0)
    return Signature(0, "operator", "aten.clone.default", (spec,), {}, spec), {0: model}, {}


STRANGE = ['"""\nimport os\n', "'); print('x", "\\", "\r\nraise", "é\u202e", "\ud800", "{x}", "#"]


@pytest.mark.parametrize("text", STRANGE)
def test_text_of_a_trace_is_never_code(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = TensorSpec((2,), (1,), torch.float32, "cpu")
    signature = Signature(0, "operator", "aten.div.Tensor_mode", (spec, spec), {"rounding_mode": text}, spec)
    source = script_of(signature, {}, {"threads": text, "matmul_precision": text, "default_dtype": text}, [text])
    check_source(source)
    plain = script_of(signature, {}, {}, ["x"])
    assert [type(node) for node in ast.walk(ast.parse(source))] == [type(node) for node in ast.walk(ast.parse(plain))]
    texts = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)]
    assert text in texts


@pytest.mark.parametrize(
    ("op", "kind", "reason"),
    [
        ("os.system.default", "operator", "not registered"),
        ("aten.relu.default\nimport os", "operator", "is not the name of an operator"),
        ("aten.relu", "operator", "is not the name of an operator"),
        ("aten.__class__.default", "operator", "not registered"),
        ("mmcv._ext:nms", "extension", "is not a registered operator of torch"),
    ],
)
def test_only_registered_operators_are_written(op: str, kind: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        script_of(Signature(0, kind, op, (), {}, None), {}, {})


@pytest.mark.parametrize("name", ["coo", "csr", "quint8", "nested"])
@pytest.mark.filterwarnings("ignore")
def test_unsupported_tensor_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    tensor = UNUSUAL[name]()
    with pytest.raises(UserError, match="opreplay"):
        exported(tmp_path / "t.jsonl", lambda: torch.ops.aten.detach(tensor), "aten.detach.default")


def test_huge_tensors_keep_the_script_small() -> None:
    spec = TensorSpec((1 << 40, 1 << 10), (1 << 10, 1), torch.float32, "cpu", values=0)
    model = fit(torch.randn(100))
    assert model is not None
    source = script_of(Signature(0, "operator", "aten.relu.default", (spec,), {}, spec), {0: model}, {})
    assert len(source) < 6000


def test_export_case_writes_a_file_that_runs_on_its_own(tiny_trace: Path, tmp_path: Path) -> None:
    number = next(item.number for item in load(tiny_trace).signatures if item.op == "aten.convolution.default")
    succeed("opgrip", "trace", "export-case", tiny_trace, number, "-o", "case.py", cwd=tmp_path)
    run = run_python("case.py", "--repeats", "3", cwd=tmp_path, status=0)
    assert run.stdout.startswith("result float32[2, 4, 6, 6]\neager: median ")
    for wrong in (
        (tiny_trace, 10**6, "-o", "x.py"),
        (tiny_trace, number, "-o", "x.txt"),
        (tiny_trace, "branch", "-o", "x.py"),
        (tiny_trace, "-o", "x.py"),
        (tiny_trace, number, "--mode", "jit", "-o", "x.py"),
    ):
        refusal("opgrip", "trace", "export-case", *wrong, cwd=tmp_path, in_one_line=True)
    assert not (tmp_path / "x.py").exists()


class Branch(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(6, 5)
        self.scale = 3.0

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.inner(x) * self.scale
        parts = y.split(2, dim=1)
        return torch.cat([parts[0].relu(), parts[1]], 1), y.view(-1)


class Whole(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branch = Branch()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, other = self.branch(x.sin())
        return one.sum() + other.sum()


@pytest.fixture
def branch_trace(tmp_path: Path) -> Path:
    model = Whole()
    with Capture(tmp_path / "t.jsonl", model=model):
        model(torch.randn(4, 6)).backward()
    return tmp_path / "t.jsonl"


@pytest.mark.parametrize("name", ["branch", "branch (Branch) backward"])
def test_module_is_exported_as_one_function(
    name: str, branch_trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    what, source = export_unit(load(branch_trace), name, "module", "eager")
    assert re.match(r"branch \(Branch\)( backward)?, from its \d+ recorded operators,", what)
    check_source(source)
    script = run_script(source, tmp_path / "case.py", monkeypatch)
    positional, named = script["make_inputs"]("cpu")
    results = script["OPERATOR"](*positional, **named)
    if name == "branch":
        # two for the program, others for the backward pass
        assert {(4, 4), (20,)} <= {tuple(result.shape) for result in results}
        assert script["compare"](list(results), [result + 1 for result in results]) is False


@pytest.mark.slow
def test_exported_module_is_compiled_by_its_file(branch_trace: Path, tmp_path: Path) -> None:
    words = ("branch", "--unit", "module", "--mode", "compile:aot_eager", "-o", "repro.py")
    done = succeed("opgrip", "trace", "export-case", branch_trace, *words, cwd=tmp_path)
    assert "from its " in done.stderr
    lines = run_python("repro.py", "--repeats", "3", cwd=tmp_path, status=0).stdout.splitlines()
    assert [line.partition(" median")[0] for line in lines[-2:]] == ["eager:", "compile:aot_eager:"]
    if not torch.cuda.is_available():
        done = run_python("repro.py", "--device", "cuda:0", cwd=tmp_path, status=1)
        assert done.stderr == "cuda:0 is not available here: choose another with --device, such as cpu\n"


def test_argument_name_of_a_module_call_is_never_code(branch_trace: Path) -> None:
    trace = load(branch_trace)
    signatures = [
        replace(item, kwargs={"x=print(1) or": 1}) if "relu" in item.op else item for item in trace.signatures
    ]
    with pytest.raises(UserError, match="cannot be the name of an argument"):
        export_unit(replace(trace, signatures=signatures), "branch", "module", "eager")


NETS = """
import torch


def halve(x):
    return x / 2


class Branch(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(6, 5)
        self.limits = {"low": 0.0, "scales": [torch.tensor([3.0]), None]}

    def forward(self, x):
        for scale in self.limits["scales"]:
            x = halve(x) if scale is None else x * scale
        return self.inner(x).clamp(min=self.limits["low"])


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(Branch(), torch.nn.ReLU()), torch.ones(4, 6)
"""


@pytest.mark.slow
def test_module_is_exported_from_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nets.py").write_text(NETS)
    words = ("--model", "nets.py:net", "--grip", "*:Branch.forward", "--steps", "1", "--warmup", "0", "-o", "t.jsonl")
    succeed("opcapture", *words, cwd=tmp_path)
    words = ("grips/Branch_forward", "0", "--mode", "compile:eager", "-o", "repro.py")
    done = succeed("opgrip", "trace", "export-case", *words, cwd=tmp_path)
    assert "call 0 of nets:Branch.forward, from its source, to repro.py" in done.stderr
    source = (tmp_path / "repro.py").read_text()
    assert "def halve(x):" in source
    script = run_script(source, tmp_path / "repro.py", monkeypatch)
    positional, named = script["make_inputs"]("cpu")
    torch.manual_seed(0)
    inner = torch.nn.Linear(6, 5)
    expected = inner(torch.ones(4, 6) * 3 / 2).clamp(min=0)
    # few values are written with a limited number of digits
    torch.testing.assert_close(script["OPERATOR"](*positional, **named), expected, rtol=1e-3, atol=1e-3)
    lines = run_python("repro.py", "--repeats", "3", cwd=tmp_path, status=0).stdout.splitlines()
    assert [line.partition(" median")[0] for line in lines[1:]] == ["eager:", "compile:eager:"]
    words = ("trace", "export-case", "grips/Branch_forward", "9", "-o", "x.py")
    assert "has 1 call, and none numbered 9" in refusal("opgrip", *words, cwd=tmp_path)
