"""Operators that a program registers: the trace has where, and the row has the command that runs them."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

import pytest
import torch
from programs import run_command, succeed

from opgrip.capture.torch_compat.torch_private import registered_by
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
def test_row_of_a_custom_operator_shows_the_command_that_runs_it(program: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(program / "my programs")}
    words: list[str] = ["t.jsonl"]
    for op in ("own.half.default", "first.twice.default", "_C.thrice.default"):
        row = rows(program, *words, env=env)[op]
        assert row["status"] == "unsupported"
        reason, _, command = row["error"].partition(" is not trusted: run it with opreplay ")
        assert reason == op
        # nothing that only the trace names was imported
        assert (program / "imported").exists() is (len(words) > 1)
        words = shlex.split(command)
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
