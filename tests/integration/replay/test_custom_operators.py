"""Operators that a program registers: the trace has where, and they run when the user names it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from programs import run_command, succeed

from opgrip.capture.torch_compat.torch_private import registered_by
from opgrip.replay.operators.admission import LOOK_FOR
from opgrip.traces import load

CUSTOM_OP = """
import torch
@torch.library.custom_op("first::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2
"""
LIBRARY = """
import torch
library = torch.library.Library("_C", "DEF")
library.define("thrice(Tensor x) -> Tensor")
library.impl("thrice", lambda x: x * 3, "CompositeExplicitAutograd")
"""
SCRIPT = """
import sys, torch
import helper
@torch.library.custom_op("own::half", mutates_args=())
def half(x: torch.Tensor) -> torch.Tensor:
    return x / 2
if __name__ == "__main__":
    import mypackage.deep.ops, mypackage._kernels
    x = torch.ones(3)
    half(torch.ops.first.twice(torch.ops._C.thrice(x)))
torch.ones(2, requires_grad=True).sum().backward()
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a program, and the trace that it left in another folder."""
    folder = tmp_path_factory.mktemp("custom")
    package = folder / "my programs" / "mypackage"
    (package / "deep").mkdir(parents=True)
    for file, text in (("__init__.py", ""), ("deep/__init__.py", ""), ("deep/ops.py", CUSTOM_OP)):
        (package / file).write_text(text, encoding="utf-8")
    (package / "_kernels.py").write_text(LIBRARY, encoding="utf-8")
    (package.parent / "helper.py").write_text("open('imported', 'w').close()", encoding="utf-8")
    (package.parent / "train.py").write_text(SCRIPT, encoding="utf-8")
    succeed("opcapture", "-o", "t.jsonl", "--", "my programs/train.py", cwd=folder)
    (folder / "imported").unlink()
    return folder


def rows(folder: Path, *words: str, env: dict[str, str] | None = None) -> dict[str, dict[str, str]]:
    run_command("opreplay", *words, "--iterations", "1", "-f", "-o", "r.json", cwd=folder, env=env)
    found = json.loads((folder / "r.json").read_text(encoding="utf-8"))
    return {row["op"]: row for row in found["results"]}


def test_trace_has_the_module_or_file_that_registered_an_operator(program: Path) -> None:
    origins = {item.op: item.registered_by for item in load(program / "t.jsonl", partial=False).signatures}
    assert origins["own.half.default"] == str(program / "my programs" / "train.py")
    assert origins["first.twice.default"] == "mypackage.deep.ops"
    assert origins["_C.thrice.default"] == "mypackage._kernels"
    assert origins["aten.ones.default"] is None
    hidden = run_command("opgrip", "trace", "redact", "t.jsonl", "-f", "-o", "hidden.jsonl", cwd=program)
    assert hidden.returncode == 0, hidden.stderr
    assert not any(item.registered_by for item in load(program / "hidden.jsonl").signatures)


@pytest.mark.slow
def test_custom_operator_runs_once_its_module_or_file_is_named(program: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(program / "my programs")}
    words: list[str] = ["t.jsonl"]
    script = str(program / "my programs" / "train.py")
    origins = {
        "own.half.default": script,
        "first.twice.default": "mypackage.deep.ops",
        "_C.thrice.default": "mypackage._kernels",
    }
    for op, origin in origins.items():
        row = rows(program, *words, env=env)[op]
        assert row["status"] == "unsupported"
        # a command that runs what only the trace names is not offered, and nothing of it was imported
        assert row["error"] == f"{op} is not trusted: {LOOK_FOR}"
        assert (program / "imported").exists() is (len(words) > 1)
        words += ["--extension", origin]
        row = rows(program, *words, env=env)[op]
        assert row["status"] == "ok", row["error"]
    assert len(words) == 7
    by_op = rows(program, *words, env=env)
    assert {row["status"] for row in by_op.values()} == {"ok"}


def test_module_of_a_triton_operator_is_found() -> None:
    @torch.library.triton_op("own_triton::twice", mutates_args={})
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    assert registered_by(torch.ops.own_triton.twice.default) == __name__
    assert registered_by(torch.ops.aten.add.Tensor) is None
