"""Clients that disconnect, and threads that end, before a requested recording is complete."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from programs import program_path, receive_ctrl_c, run_python, wait_for
from services import SERVER, ask, environment, on_demand, running

from opgrip.traces import load


@pytest.fixture
def folder() -> Iterator[Path]:
    with TemporaryDirectory() as name:
        path = Path(name).resolve()
        (path / "server.py").write_text(SERVER, encoding="utf-8")
        yield path


def asking(folder: Path, name: str) -> subprocess.Popen[str]:
    """Start a client that requests more steps than the program runs, and wait until they begin."""
    process = subprocess.Popen(
        [program_path("opcapture"), "trigger", "server", "--steps", "1000000", "-o", name],
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=environment(folder),
        preexec_fn=receive_ctrl_c,
    )
    assert process.stderr is not None
    assert "waits for a step" in process.stderr.readline()
    wait_for(lambda: any(part.stat().st_size > 2000 for part in folder.glob(f"{Path(name).stem}*.jsonl*")), process)
    return process


@pytest.mark.slow
def test_recording_ends_when_its_client_disconnects(folder: Path) -> None:
    with running(folder, *on_demand("--", "server.py")) as server:
        interrupted = asking(folder, "interrupted.jsonl")
        interrupted.send_signal(signal.SIGINT)
        _, errors = interrupted.communicate(timeout=60)
        assert interrupted.returncode == 130
        assert f"to {folder / 'interrupted.jsonl'}" in errors
        assert load(folder / "interrupted.jsonl", partial=False).calls.size > 0
        killed = asking(folder, "killed.jsonl")
        killed.kill()
        killed.communicate()
        wait_for((folder / "killed.jsonl").exists, server, 60)
        assert load(folder / "killed.jsonl", partial=False).calls.size > 0
        assert ask(folder, "trigger", "server", "--steps", "1").returncode == 0


PROGRAM = """
import gc, sys, threading, torch, opgrip.capture
from opgrip.capture.torch_compat.compiler_private import OrderlyMode
from opgrip.capture.on_demand.agent import agent_here
from opgrip.capture.on_demand.agent import marks
from opgrip.capture.on_demand.session import StepRecording

def step():
    opgrip.capture.step()
    torch.ones(2).sin()

def recordings():
    gc.collect()
    return sum(type(item) is StepRecording for item in gc.get_objects())

step()
"""
ENDS_IN_STEP = """
asked = opgrip.capture.trigger("t.jsonl", steps=2, warmup=int(sys.argv[1]))
for number in range(400):
    # the number of one thread is the next one's
    thread = threading.Thread(target=step)
    thread.start()
    thread.join()
    if asked.wait(0.05 * (number > 4)):
        break
print(asked.problem, asked.result["steps"], asked.result["cut"], marks.listeners, recordings(), OrderlyMode._entered)
"""


@pytest.mark.parametrize("warmup", [0, 1])
@pytest.mark.slow
def test_steps_that_end_with_their_threads_are_cut_and_counted(tmp_path: Path, warmup: int) -> None:
    done = run_python("-c", PROGRAM + ENDS_IN_STEP, warmup, cwd=tmp_path, env=environment(tmp_path))
    # torch compiles nothing while a mode is counted as active
    assert done.stdout == "None 0 2 () 0 0\n", done.stderr
    assert (load(tmp_path / "t.jsonl", partial=False).calls["op"] == "aten.sin.default").sum() == 2
