"""Agents loaded into programs that started without one."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest
from optional import needs
from programs import program_path
from services import ask, environment, python, running

from opgrip.traces import load

PLAIN = """
import threading, time, torch
net = torch.nn.Linear(2, 2).eval()
def serve():
    while True:
        net(torch.ones(1, 2))
        time.sleep(0.002)
threading.Thread(target=serve, daemon=True).start()
print("ready", flush=True)
while True:
    time.sleep(0.1)
    print("goes on", flush=True)
"""


@pytest.mark.slow
@needs("gdb")
def test_signal_during_attach_reaches_the_program(tmp_path: Path) -> None:
    program = "import time, torch\nprint('ready', flush=True)\nwhile True:\n    time.sleep(0.01)\n"
    (tmp_path / "loop.py").write_text(program, encoding="utf-8")
    for wait_s in (0.2, 0.35, 0.5):
        with running(tmp_path, *python("loop.py")) as process:
            command = [program_path("opcapture"), "attach", str(process.pid)]
            attach = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment(tmp_path))
            time.sleep(wait_s)
            process.terminate()
            attach.wait(60)
            assert process.wait(10) == -signal.SIGTERM


@pytest.mark.slow
@needs("gdb")
def test_attach_adds_an_agent_to_a_running_program(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(PLAIN, encoding="utf-8")
    with running(tmp_path, *python("plain.py")) as process:
        done = ask(tmp_path, "attach", process.pid)
        if "the system does not allow gdb" in done.stderr:
            pytest.skip(done.stderr)
        assert done.returncode == 0, done.stderr
        assert "already has an agent" in ask(tmp_path, "attach", process.pid).stderr
        assert ask(tmp_path, "trigger", process.pid, "--steps", "2", "-o", "t.jsonl").returncode == 0
        count = (tmp_path / "said.txt").read_text().count("goes on")
        while (tmp_path / "said.txt").read_text().count("goes on") < count + 3:
            assert process.poll() is None
    assert len(load(tmp_path / "t.jsonl", partial=False).labels) == 2


def test_attach_rejects_a_missing_or_non_python_process(tmp_path: Path) -> None:
    done = ask(tmp_path, "attach", 99999999)
    error = "opcapture attach: error: no process has the number 99999999: see opcapture list\n"
    assert (done.returncode, done.stderr) == (2, error)
    with subprocess.Popen(["sleep", "100"]) as process:
        try:
            assert "does not run Python" in ask(tmp_path, "attach", process.pid).stderr
        finally:
            process.kill()
