"""Private captures: they never write names, paths, texts or values of the program."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from programs import refusal, run_command, succeed
from torch import nn

from opgrip.capture import Capture
from opgrip.errors import UserError
from opgrip.traces import load
from opgrip.traces.analysis.validation import validate

CARD = 4111111111111111
PROGRAM = """\
import sys
import threading

import torch
from torch import nn


class SECRETNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.SECRETlayer = nn.Linear(4, 4)
        self.embedding = nn.Embedding(50, 4)

    def forward(self, x, words):
        with torch.profiler.record_function("SECRET-label"):
            y = self.SECRETlayer(x) + self.embedding(words)
        y = y.masked_fill(torch.tensor([[True, False, False, False]]), 4111111111111111)
        return y, torch.tensor([4111111111111111, 3]).unique(), torch.tensor([4111111111111111.0, 1]).double() * 2


model = SECRETNet()
thread = threading.Thread(target=lambda: torch.ones(2).neg(), name="SECRET-thread")
thread.start()
thread.join()
try:
    torch.zeros(2) @ torch.zeros(3)
except RuntimeError:
    pass
model(torch.randn(3, 4), torch.tensor([7, 31, 7]))
"""


def test_private_trace_of_a_script_contains_no_secret(tmp_path: Path) -> None:
    (tmp_path / "SECRET_program.py").write_text(PROGRAM)
    succeed(
        *(
            "opcapture",
            "--private",
            "--stack-depth",
            "3",
            "-o",
            "t.jsonl",
            "--",
            "SECRET_program.py",
            "--token",
            "SECRET",
        ),
        cwd=tmp_path,
    )
    text = (tmp_path / "t.jsonl").read_text()
    assert "SECRET" not in text
    assert str(CARD)[:6] not in text
    assert validate(tmp_path / "t.jsonl").findings == []
    assert {"Linear", "Embedding"} <= {scope.module_type for scope in load(tmp_path / "t.jsonl").scopes}


CUSTOM = """
import torch
library = torch.library.Library("acme", "DEF")
library.define("fused(Tensor x) -> Tensor")
library.impl("fused", lambda x: x.neg(), "CPU")
torch.ops.acme.fused(torch.ones(2))
"""


def test_private_capture_reports_custom_operators_whose_names_stay(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(CUSTOM)
    done = run_command("opcapture", "--private", "-o", "t.jsonl", "--", "program.py", cwd=tmp_path)
    assert "names of custom operators are not hidden, because a replay needs them: acme.fused.default;" in done.stderr
    done = run_command("opcapture", "-o", "u.jsonl", "--", "program.py", cwd=tmp_path)
    assert "custom operators" not in done.stderr
    # redacting again hides the operator names that the first redaction kept
    run_command("opgrip", "trace", "redact", "t.jsonl", "-o", "h.jsonl", "--hide-operators", cwd=tmp_path)
    assert "acme" in (tmp_path / "t.jsonl").read_text()
    assert "acme" not in (tmp_path / "h.jsonl").read_text()


def test_default_name_of_a_private_capture_hides_the_program(tmp_path: Path) -> None:
    (tmp_path / "SECRET_program.py").write_text("import torch; torch.ones(2).neg()")
    done = succeed("opcapture", "--private", "--", "SECRET_program.py", cwd=tmp_path)
    assert (tmp_path / "private.jsonl").exists()
    assert "SECRET" not in done.stderr


class SecretNet(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tensor([CARD, 1])


def test_private_capture_writes_no_secret_to_disk_while_it_runs(tmp_path: Path) -> None:
    def written() -> str:
        return "".join(path.read_text() for path in tmp_path.iterdir())

    with Capture(tmp_path / "t.jsonl", private=True, write_ahead=True) as capture:
        SecretNet()(torch.arange(2))
        # each call is written before it runs
        assert "aten.add.Tensor" in written()
        assert "Secret" not in written()
        assert str(CARD) not in written()
    assert capture.problem is None
    assert "Secret" not in written()
    assert str(CARD) not in written()


def test_private_captures_with_one_salt_have_the_same_names(tmp_path: Path) -> None:
    for name in ("a", "b"):
        with Capture(tmp_path / f"{name}.jsonl", private=True, salt_file=tmp_path / "salt"):
            SecretNet()(torch.arange(2))
    with Capture(tmp_path / "c.jsonl", private=True):
        SecretNet()(torch.arange(2))
    names = [{scope.module_type for scope in load(tmp_path / f"{name}.jsonl").scopes} for name in "abc"]
    assert names[0] == names[1] != names[2]


def test_private_capture_refuses_options_that_write_values(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="which writes the values"):
        Capture(tmp_path / "t.jsonl", private=True, values="full")
    with pytest.raises(UserError, match="writes source and values"):
        Capture(tmp_path / "t.jsonl", private=True, grip=["m:f"], grip_to=tmp_path / "grips")
    with pytest.raises(UserError, match="--private"):
        Capture(tmp_path / "t.jsonl", salt_file=tmp_path / "salt")
    assert "--grip, which writes" in refusal("opcapture", "--private", "--grip", "m:f", "-o", tmp_path / "t.jsonl")
