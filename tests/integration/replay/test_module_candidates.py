"""Candidates for modules, judged on the recorded forward passes, and files to begin candidates with."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from busy import compared_times
from programs import ROOT, refusal, run_command, succeed
from torch import Tensor, nn

from opgrip import Capture, judge
from opgrip.replay.cases.cases import make_cases
from opgrip.replay.cases.selection import Selection
from opgrip.tools.opgrip import main
from opgrip.traces import load

WIDTH = 8
RIGHT = {"slower", "undecided", "equal", "faster"}
KERNELS = """\
from time import perf_counter

import torch
from torch import nn


class Fused(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x):
        return x + nn.functional.gelu(self.linear(self.norm(x))) * self.scale


class Delayed(Fused):
    def forward(self, x):
        until = perf_counter() + 0.02
        while perf_counter() < until:
            pass
        return super().forward(x)


class Wide(Fused):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 16)


class Paired(Fused):
    def forward(self, x, mask):
        return x
"""


class Block(nn.Module):
    """Block whose input has the shape of its weight, and is used before it."""

    def __init__(self, activation: Callable[[Tensor], Tensor] = nn.functional.gelu) -> None:
        super().__init__()
        self.norm, self.linear, self.activation = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), activation
        nn.init.normal_(self.norm.weight)
        nn.init.normal_(self.norm.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.activation(self.linear(self.norm(x)))


class Fused(Block):
    """The same computation by other operators, with submodules of other names."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.first, self.second = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        centered = x - mean
        scaled = centered * (centered.square().mean(-1, keepdim=True) + self.first.eps).rsqrt()
        weight, bias = self.second.weight, self.second.bias
        return x + nn.functional.gelu((scaled * self.first.weight + self.first.bias) @ weight.T + bias)


class Detached(Fused):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out.detach() + (x - x.detach())


def of_tensors(x: Tensor, scale: Tensor, shift: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    normed = nn.functional.layer_norm(x, (WIDTH,), scale, shift)
    return x + nn.functional.gelu(nn.functional.linear(normed, weight, bias))


def net(*blocks: nn.Module) -> nn.Module:
    """Return a model of blocks, after an operator and before a layer of other classes."""
    return nn.Sequential(nn.Tanh(), nn.Sequential(*blocks), nn.Linear(WIDTH, 3))


def predicted(path: Path, *blocks: nn.Module) -> Path:
    torch.manual_seed(0)
    model = net(*blocks).eval()
    with torch.no_grad(), Capture(path, model=model, values="full"):
        model(torch.randn(WIDTH, WIDTH))
    return path


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return predicted(tmp_path_factory.mktemp("modules") / "predict.jsonl", Block(), Block(), Block())


def verdicts_of(trace: Path, candidate: Callable[..., Any], pattern: str = "1.*", **options: Any) -> dict[str, str]:
    frame = judge({f"module:{pattern}": candidate}, trace, unit="module", iterations=2, **options).frame
    return {f"{row.op} {row.direction}": row.error or row.verdict for row in frame.itertuples()}


@pytest.mark.parametrize("candidate", [Fused, Fused(), of_tensors])
def test_class_object_and_function_are_right_on_each_module(trace: Path, candidate: Callable[..., Any]) -> None:
    verdicts = verdicts_of(trace, candidate)
    assert verdicts.keys() == {f"1.{place} (Block) forward" for place in range(3)}
    assert set(verdicts.values()) <= RIGHT


def test_wrong_module_is_named_with_a_command_that_exports_it(tmp_path: Path) -> None:
    path = predicted(tmp_path / "t.jsonl", Block(), Block(nn.functional.relu), Block())
    verdict = judge({"module:1.*": Fused}, path, unit="module", iterations=2)
    (wrong,) = (row for row in verdict.frame.itertuples() if row.verdict == "wrong")
    assert wrong.module == "1.1"
    assert not verdict.is_right
    assert "wrong on 1 of 3 signatures; " in str(verdict)
    done = run_command(*wrong.export.split(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_share_of_the_step_counts_each_call_of_a_module_once(trace: Path) -> None:
    frame = judge({"module:1*": net(Fused(), Fused(), Fused())[1]}, trace, unit="module", iterations=2).frame
    cases = make_cases(load(trace))
    inside = make_cases(load(trace), Selection(module=("1.*",)))
    expected = sum(case.captured_total_us for case in inside) / sum(case.captured_total_us for case in cases)
    assert frame["op"].tolist() == ["1"]
    assert frame["step_share"].sum() == pytest.approx(expected)


def test_last_module_returns_what_its_last_operator_does_not_keep_for_a_backward(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), nn.LayerNorm(WIDTH))
    with torch.no_grad(), Capture(tmp_path / "t.jsonl", model=model, values="full"):
        model(torch.randn(WIDTH, WIDTH))
    candidate = lambda x, scale, shift: nn.functional.layer_norm(x, (WIDTH,), scale, shift)  # noqa: E731
    (verdict,) = verdicts_of(tmp_path / "t.jsonl", candidate, "1").values()
    assert verdict in RIGHT


def test_training_judges_results_of_the_module_and_gradients(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = net(nn.Sequential(Block(), nn.Dropout(0.5)), Block())
    with Capture(tmp_path / "train.jsonl", model=model, values="full"):
        model(torch.randn(WIDTH, WIDTH)).sum().backward()
    verdicts = verdicts_of(tmp_path / "train.jsonl", Fused, "1.1")
    assert verdicts.keys() == {"1.1 (Block) forward", "1.1 (Block) backward"}
    assert set(verdicts.values()) <= RIGHT
    detached = verdicts_of(tmp_path / "train.jsonl", Detached, "1.1")
    assert "differ" in detached["1.1 (Block) backward"]


def test_file_to_begin_with_lists_the_tensors_and_is_right(trace: Path, tmp_path: Path) -> None:
    done = run_command("opgrip", "candidate", "init", "module:1.0", trace, "-o", "block.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "block.py").read_text(encoding="utf-8").splitlines()
    assert (
        "#   x0   float32[8,8]             input of aten.native_layer_norm.default, computed by an earlier call"
        in lines
    )
    assert "#   x3   float32[8,8]             self of aten.t.default" in lines
    (command,) = (line.removeprefix("#     ") for line in lines if line.startswith("#     opreplay "))
    done = run_command(*command.split(), "--iterations", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "wrong" not in done.stdout
    done = run_command("opgrip", "candidate", "init", "module:1.9", trace, "-o", "other.py", cwd=tmp_path)
    assert "no module 1.9 is recorded" in done.stderr


@pytest.mark.slow
@pytest.mark.alone
def test_command_holds_a_class_to_a_gate_and_writes_the_judgement(trace: Path, tmp_path: Path) -> None:
    (tmp_path / "kernels.py").write_text(KERNELS, encoding="utf-8")
    words = ["--unit", "module", "--candidate", "module:1.0=kernels.py:Delayed", "--iterations", "40", "--threads", "1"]
    done = run_command("opreplay", trace, *words, "--gate", "slower<=5%", "-o", "rows.json", cwd=tmp_path)
    assert "of the step (this module takes " in done.stdout, done.stderr
    written = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator(json.loads((ROOT / "replay" / "schema.json").read_text())).validate(written)
    (step,) = written["judgement"]["steps"]
    assert 0 < step["share"] < 1
    with compared_times():
        assert step["verdicts"]["slower"] == 1
        assert done.returncode == 1


@pytest.mark.parametrize(
    ("candidate", "unit", "message"),
    [
        ("module:1.0=kernels.py:Fused", "call", "module:1.0 is for modules as a whole: add --unit module"),
        (
            "aten.gelu.default=kernels.py:Fused",
            "module",
            "aten.gelu.default is for single calls, not for --unit module",
        ),
        ("module:1.0.lin=kernels.py:Fused", "module", "in full: --candidate module:1.0.linear=FILE.py:NAME"),
        (
            "module:?=kernels.py:Fused",
            "module",
            "--candidate module:? matches modules of 2 classes: 0 (Tanh), 2 (Linear)",
        ),
        ("module:1.0=kernels.py:Fuse", "module", "has no class or function Fuse: did you mean Fused?"),
        ("module:1.0=kernels.py:Wide", "module", "Wide.linear.weight is float32[16,8], and none"),
        ("module:1.0=kernels.py:Paired", "module", "Paired.forward(x, mask) does not accept the inputs"),
        ("module:1.0=kernels.py:Fused --confirm", "module", "candidates for modules do not support --confirm"),
    ],
)
def test_mistakes_are_reported_in_one_line(
    trace: Path, tmp_path: Path, candidate: str, unit: str, message: str
) -> None:
    (tmp_path / "kernels.py").write_text(KERNELS, encoding="utf-8")
    words = ["--unit", unit, "--candidate", *candidate.split(), "--iterations", "2"]
    done = run_command("opreplay", trace, *words, cwd=tmp_path)
    assert done.returncode
    assert message in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


OWN_OPERATOR = """\
import torch


@torch.library.custom_op("init_own::halved", mutates_args=())
def halved(x: torch.Tensor) -> torch.Tensor:
    return x / 2
"""


@pytest.fixture(scope="module")
def operators_trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a trace with operators that return, view and write, and one of an own namespace."""
    folder = tmp_path_factory.mktemp("candidate_files")
    (folder / "own_ops.py").write_text(OWN_OPERATOR, encoding="utf-8")
    namespace: dict[str, object] = {}
    exec(OWN_OPERATOR, namespace)
    with Capture(folder / "step.jsonl"):
        torch.softmax(torch.randn(64, 50).t(), -1)
        torch.nn.functional.gelu(torch.randn(8, 8), approximate="tanh")
        torch.randn(8, 8).add_(torch.randn(8, 8), alpha=2)
        torch.randn(4, 6).t()
        torch.mul(torch.randn(3), torch.randn(3), out=torch.empty(3))
        torch.empty(16).random_(3, 9)
        torch.nn.functional.dropout(torch.ones(64, 64), 0.5)
        torch.ops.init_own.halved(torch.randn(5))
    return folder / "step.jsonl"


def init(op: str, folder: Path, *words: object) -> tuple[Path, str]:
    done = succeed("opgrip", "candidate", "init", op, *words, "-o", "mine.py", cwd=folder)
    return folder / "mine.py", done.stderr.splitlines()[-1].partition("judge it with: ")[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "text"),
    [
        ("aten._softmax.default", "return torch.ops.aten._softmax.default(self, dim, half_to_float)"),
        ("aten.gelu.default", "def gelu("),
        (
            "aten.add_.Tensor",
            "def add(self, other, *, alpha=1):\n    return torch.ops.aten.add_.Tensor(self, other, alpha=alpha)",
        ),
        ("aten.mul.out", "def mul(self, other, *, out):"),
        ("aten.random_.from", "getattr(torch.ops.aten.random_, 'from')(*args, **kwargs)"),
        ("aten.bernoulli_.float", "def bernoulli(self, p=0.5, *, generator=None):"),
    ],
)
def test_file_is_judged_right_by_the_printed_command(
    operators_trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], op: str, text: str
) -> None:
    # in this process, whose replays run in forks: the command would start an interpreter for them
    assert main(["candidate", "init", op, str(operators_trace), "-o", str(tmp_path / "mine.py")]) == 0
    command = capsys.readouterr().err.splitlines()[-1].partition("judge it with: ")[2]
    content = (tmp_path / "mine.py").read_text(encoding="utf-8")
    assert text in content
    assert f"# Schema: aten::{op.removeprefix('aten.').removesuffix('.default')}(" in content
    assert command in content
    done = run_command(*command.split(), "--iterations", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert "wrong" not in done.stdout


def test_file_lists_recorded_calls_with_layouts_and_shares(operators_trace: Path, tmp_path: Path) -> None:
    assert (
        main(["candidate", "init", "aten._softmax.default", str(operators_trace), "-o", str(tmp_path / "mine.py")]) == 0
    )
    content = (tmp_path / "mine.py").read_text(encoding="utf-8")
    (row,) = [line for line in content.splitlines() if "float32[50,64] strides [1, 50], -1, False" in line]
    assert row.split()[1].endswith("%")
    assert row.split()[2] == "1"
    assert "# Documentation of torch.nn.functional.softmax: Apply a softmax function." in content


def test_operator_of_own_namespace_needs_its_module(operators_trace: Path, tmp_path: Path) -> None:
    extension = operators_trace.with_name("own_ops.py")
    words = ("candidate", "init", "init_own.halved.default", operators_trace, "-o", "x.py")
    assert "with --extension" in refusal("opgrip", *words, cwd=tmp_path)
    _, command = init("init_own.halved.default", tmp_path, operators_trace, "--extension", str(extension))
    assert f"--extension {extension}" in command
    done = run_command(*command.split(), "--iterations", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_sample_begins_with_a_call_of_it(tmp_path: Path) -> None:
    path, command = init("sample:delta2bbox", tmp_path)
    content = path.read_text(encoding="utf-8")
    assert "def delta2bbox(rois, deltas, means=(0.0, 0.0, 0.0, 0.0), " in content
    assert "return opgrip.samples." in content
    done = run_command(*command.split(), "--iterations", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert "wrong" not in done.stdout


@pytest.mark.slow
def test_gripped_sample_begins_with_its_code_and_is_judged_on_all_kept_calls(tmp_path: Path) -> None:
    script = (
        "import torch\n\nLIMIT = 0.5\n\n\ndef kept(scores):\n    return scores[scores > LIMIT] * 2\n\n\n"
        "for value in (0.6, 0.7, 0.8):\n    kept(torch.full((64, 64), value))\n"
    )
    (tmp_path / "detect.py").write_text(script, encoding="utf-8")
    succeed("opgrip", "grip", "detect.py", "--function", "kept", "--per-signature", "2", cwd=tmp_path)
    path, command = init("grips/kept", tmp_path)
    content = path.read_text(encoding="utf-8")
    assert "def kept(scores):" in content
    assert "LIMIT = 0.5" in content
    memo = "\n\nresults = []\n\n\ndef memo(x):\n    results[:] = results or [kept(x)]\n    return results[0].clone()\n"
    path.write_text(content + memo, encoding="utf-8")
    for name, status, text in (("kept", 0, "2 cases in 4 rows: 4 ok"), ("memo", 1, "2 wrong")):
        for options in ([], ["--untrusted"]):
            words = [*command.replace("mine.py:kept", f"mine.py:{name}").split(), "--iterations", "2", *options]
            done = run_command(*words, cwd=tmp_path)
            assert (done.returncode, text in done.stderr) == (status, True), done.stdout + done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["aten.softmax.default", "TRACE", "-o", "x.py"], "no call of aten.softmax.default is recorded"),
        (["aten._softmax", "TRACE", "-o", "x.py"], "it has aten._softmax.default"),
        (["aten._softmax.default", "TRACE", "-o", "there.py"], "there.py exists"),
        (["aten._softmax.default", "-o", "x.py"], "a trace is missing"),
        (["sample:delta2bbox", "TRACE", "-o", "x.py"], "sample:delta2bbox takes no trace"),
        (["sample:delta", "-o", "x.py"], "unknown sample 'delta'"),
        ([".", "-o", "x.py"], ". contains no sample"),
    ],
)
def test_mistakes_of_candidate_init_are_reported_in_one_line(
    operators_trace: Path, tmp_path: Path, words: list[str], message: str
) -> None:
    (tmp_path / "there.py").write_text("", encoding="utf-8")
    named = [operators_trace if word == "TRACE" else word for word in words]
    assert message in refusal("opgrip", "candidate", "init", *named, cwd=tmp_path, in_one_line=True)
