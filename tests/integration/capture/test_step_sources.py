"""Recordings of programs in which no step is obvious: what is reported within seconds, and what becomes a step."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from services import ask, on_demand, running

from opgrip.traces import load

NET = """
import time, torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    def forward(self, x):
        return self.inner(x).sin()
class Forever(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net
    def forward(self, x):
        while True:
            self.net(x)
            time.sleep(0.01)
net, x = Net(), torch.ones(1, 2)
print("ready", flush=True)
"""
# operators of one call of the network
STEP = ["aten.t.default", "aten.addmm.default", "aten.relu.default", "aten.sin.default"]

TRAINING = "while True: net(x); time.sleep(0.01)"
FOREVER = "Forever(net.eval())(x)"
NO_MODULE = "while True: x.sin(); time.sleep(0.01)"


def trigger(folder: Path, loop: str, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "server.py").write_text(f"{NET}\n{loop}\n", encoding="utf-8")
    with running(folder, *on_demand("--", "server.py")):
        return ask(folder, "trigger", "server", "--steps", "2", "-o", "t.jsonl", *words)


@pytest.mark.slow
def test_outermost_module_calls_are_steps(tmp_path: Path) -> None:
    done = trigger(tmp_path, TRAINING)
    assert done.stdout.split() == [str(tmp_path / "t.jsonl")], done.stderr
    assert "without backward passes and optimizers: to record these too, call opgrip.capture.step()" in done.stderr
    trace = load(tmp_path / "t.jsonl", partial=False)
    assert sorted(trace.labels.index) == ["opgrip step 1", "opgrip step 2"]
    # with gradients, relu keeps a detached result
    ops = [op for op in trace.calls["op"].astype(str) if op != "aten.detach.default" and not op.startswith("profiler.")]
    assert ops == STEP * 2
    assert set(trace.calls["module"]) == {"", "inner.0", "inner.1"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "loop", "reason"),
    [
        ((), NO_MODULE, "no module was called: call opgrip.capture.step() after each step"),
        ((), FOREVER, "modules (Net) are called inside a call that began before: name the class of the modules"),
        (("--step-module", "Other"), TRAINING, "no module of a class Other was called, but "),
        ((), f"import opgrip.capture\nopgrip.capture.step()\n{TRAINING}", "has not called opgrip.capture.step() again"),
    ],
)
def test_program_without_steps_gets_the_reason(tmp_path: Path, words: tuple[str, ...], loop: str, reason: str) -> None:
    done = trigger(tmp_path, loop, "--wait", "3s", *words)
    waiting, problem = done.stderr.splitlines()[-2:]
    assert "no step has begun yet" in waiting
    assert reason in waiting
    assert "no trace was written: no step began within 3 s" in problem
    assert reason in problem
    assert done.returncode == 2
