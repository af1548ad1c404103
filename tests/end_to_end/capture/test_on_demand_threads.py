"""Threads that end while they are recorded.

Programs run in separate processes, since a mode that is never removed stays counted.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import run_python
from services import environment

from opgrip.traces import load

PROGRAM = """
import gc, sys, threading, torch, opgrip.capture
from opgrip.capture.torch_compat.compiler_private import OrderlyMode
from opgrip.capture.on_demand.agent import agent_here
from opgrip.capture.on_demand.agent import marks
from opgrip.capture.on_demand.recorded_steps import StepRecording

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
ENDS_AFTERWARDS = """
begun, over = threading.Event(), threading.Event()

def step_that_waits():
    step()
    begun.set()
    over.wait()

asked = opgrip.capture.trigger("t.jsonl", steps=3, warmup=0)
thread = threading.Thread(target=step_that_waits)
thread.start()
begun.wait()
agent_here()._session.stop(grace_s=0.0)
print(asked.wait(60), len(marks.listeners))
over.set()
thread.join()
print(len(marks.listeners), recordings())
"""


@pytest.mark.parametrize("warmup", [0, 1])
@pytest.mark.slow
def test_steps_that_end_with_their_threads_are_cut_and_counted(tmp_path: Path, warmup: int) -> None:
    done = run_python("-c", PROGRAM + ENDS_IN_STEP, warmup, cwd=tmp_path, env=environment(tmp_path))
    # torch compiles nothing while a mode is counted as active
    assert done.stdout == "None 0 2 () 0 0\n", done.stderr
    assert (load(tmp_path / "t.jsonl", partial=False).calls["op"] == "aten.sin.default").sum() == 2


@pytest.mark.slow
def test_thread_that_ends_after_the_recording_leaves_no_hook(tmp_path: Path) -> None:
    done = run_python("-c", PROGRAM + ENDS_AFTERWARDS, cwd=tmp_path, env=environment(tmp_path))
    assert done.stdout.splitlines() == ["True 1", "0 0"], done.stderr
