"""Files to begin candidates with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from programs import refusal, run_command, succeed

from opgrip import Capture
from opgrip.tools.opgrip import main

OWN_OPERATOR = """\
import torch


@torch.library.custom_op("init_own::halved", mutates_args=())
def halved(x: torch.Tensor) -> torch.Tensor:
    return x / 2
"""


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
    """Return the file that the command writes, and the command that judges it."""
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
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], op: str, text: str
) -> None:
    # in this process, whose replays run in forks: the command would start an interpreter for them
    assert main(["candidate", "init", op, str(trace), "-o", str(tmp_path / "mine.py")]) == 0
    command = capsys.readouterr().err.splitlines()[-1].partition("judge it with: ")[2]
    content = (tmp_path / "mine.py").read_text(encoding="utf-8")
    assert text in content
    assert f"# Schema: aten::{op.removeprefix('aten.').removesuffix('.default')}(" in content
    assert command in content
    done = run_command(*command.split(), "--iterations", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert "wrong" not in done.stdout


def test_file_lists_recorded_calls_with_layouts_and_shares(trace: Path, tmp_path: Path) -> None:
    assert main(["candidate", "init", "aten._softmax.default", str(trace), "-o", str(tmp_path / "mine.py")]) == 0
    content = (tmp_path / "mine.py").read_text(encoding="utf-8")
    (row,) = [line for line in content.splitlines() if "float32[50,64] strides [1, 50], -1, False" in line]
    assert row.split()[1].endswith("%")
    assert row.split()[2] == "1"
    assert "# Documentation of torch.nn.functional.softmax: Apply a softmax function." in content


def test_operator_of_own_namespace_needs_its_module(trace: Path, tmp_path: Path) -> None:
    extension = trace.with_name("own_ops.py")
    words = ("candidate", "init", "init_own.halved.default", trace, "-o", "x.py")
    assert "with --extension" in refusal("opgrip", *words, cwd=tmp_path)
    _, command = init("init_own.halved.default", tmp_path, trace, "--extension", str(extension))
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
def test_mistakes_are_reported_in_one_line(trace: Path, tmp_path: Path, words: list[str], message: str) -> None:
    (tmp_path / "there.py").write_text("", encoding="utf-8")
    named = [trace if word == "TRACE" else word for word in words]
    assert message in refusal("opgrip", "candidate", "init", *named, cwd=tmp_path, in_one_line=True)
