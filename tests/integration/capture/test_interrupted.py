"""Tests of exceptions that interrupt a captured program, and of threads with many new signatures at once."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import async_exceptions
import pytest
import threads_at_once
import torch
from async_exceptions import MODES
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from opgrip.capture import Capture
from opgrip.capture.writing.flusher import Flusher
from opgrip.errors import is_from_program
from opgrip.traces import load
from opgrip.traces.analysis.validation import validate

PROGRAMS = Path(__file__).resolve().parents[4] / "shared/cases/programs"
OPTIONS = {"plain": (), "last 100": ("--last", "100")}
slowly = [pytest.param(mode, marks=[] if mode == "plain" else pytest.mark.slow) for mode in MODES]


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    threads, interval = torch.get_num_threads(), sys.getswitchinterval()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    sys.setswitchinterval(interval)


@pytest.mark.parametrize("mode", slowly)
def test_each_asynchronous_exception_is_raised_exactly_once(tmp_path: Path, mode: str) -> None:
    assert async_exceptions.check(mode, 45, 1, tmp_path) == []


@pytest.mark.parametrize("mode", [item for item in slowly if item.values[0] != "last 100"])
def test_concurrent_threads_with_new_signatures_leave_a_valid_trace(tmp_path: Path, mode: str) -> None:
    sys.setswitchinterval(threads_at_once.SWITCH_S)
    assert [item for number in range(2) for item in threads_at_once.check(mode, number, tmp_path)] == []


def raise_with_arguments(signum: int, frame: FrameType | None) -> None:
    raise RuntimeError("from a handler")


def raise_without_arguments(signum: int, frame: FrameType | None) -> None:
    del signum, frame
    raise RuntimeError("from a handler")


def is_programs(run: Callable[[], object]) -> list[bool]:
    """Run a function and return whether its exception is the program's; empty if it raises none."""
    answers: list[bool] = []
    try:
        run()
    except Exception as error:
        answers.append(is_from_program(error))
    return answers


@pytest.mark.parametrize("handler", [raise_with_arguments, raise_without_arguments, lambda *_: int("x")])
def test_exception_of_a_signal_handler_belongs_to_the_program(handler: Callable[..., None]) -> None:
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        assert is_programs(lambda: signal.raise_signal(signal.SIGUSR1)) == [True]
    finally:
        signal.signal(signal.SIGUSR1, before)


class TakesSeconds(Exception):
    def __init__(self, seconds: float) -> None:
        super().__init__(f"{seconds} s are over")


@pytest.mark.parametrize("kind", [RuntimeError, RuntimeError("no class"), TakesSeconds])
def test_error_from_raising_an_asynchronous_exception_belongs_to_the_program(kind: object) -> None:
    set_error, ident = ctypes.pythonapi.PyThreadState_SetAsyncExc, ctypes.c_ulong(threading.get_ident())
    assert is_programs(lambda: set_error(ident, ctypes.py_object(kind))) == [True]


def raise_itself() -> None:
    raise RuntimeError


FAULTS: list[Callable[[], object]] = [
    lambda: int("x"),
    lambda: {}[1],
    lambda: next(iter(())),
    lambda: torch.ones(2) @ torch.ones(3),
    lambda: torch.ones(2).to_sparse().untyped_storage(),
    raise_itself,
    lambda: raise_itself(1),  # type: ignore[call-arg]
]


@pytest.mark.parametrize("fault", FAULTS)
def test_exception_of_called_code_is_a_hook_error(fault: Callable[[], object]) -> None:
    assert is_programs(fault) == [False]


def test_interrupt_while_closing_leaves_a_complete_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finish = Flusher.finish

    def interrupting(flusher: Flusher) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        finish(flusher)

    monkeypatch.setattr(Flusher, "finish", interrupting)
    with pytest.raises(KeyboardInterrupt), Capture(tmp_path / "t.jsonl"):
        torch.ones(2).sin()
    trace = load(tmp_path / "t.jsonl", partial=False)
    assert trace.missing is None
    assert len(trace.calls) == 2


@pytest.mark.parametrize("number", [0, *(pytest.param(number, marks=pytest.mark.slow) for number in range(1, 35))])
@pytest.mark.parametrize("way", ["signal", "thread"])
@pytest.mark.timeout(60)
def test_capture_closes_while_many_threads_run(tmp_path: Path, way: str, number: int) -> None:
    sys.setswitchinterval(1e-4)
    capture, over = Capture(tmp_path / "t.jsonl"), threading.Event()
    stop = lambda: (capture.close(), over.set()) if way == "thread" else os.kill(os.getpid(), signal.SIGUSR1)  # noqa: E731

    def call(first: int) -> None:
        for size in range(first, first + 40):
            torch.ones(size).sin()

    before = signal.signal(signal.SIGUSR1, lambda *_: (capture.close(), over.set()))
    try:
        with capture:
            threads = [threading.Thread(target=call, args=(100 * item,)) for item in range(50)]
            for thread in threads:
                thread.start()
            threading.Timer(0.01 * (number % 10), stop).start()
            size = 10_000
            while not over.is_set():
                size += 1
                torch.ones(size)
        for thread in threads:
            thread.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert validate(tmp_path / "t.jsonl").findings == []
    assert load(tmp_path / "t.jsonl", partial=False).missing is None


def test_signal_handler_does_not_wait_for_a_lock_of_the_same_thread(tmp_path: Path) -> None:
    with Capture(tmp_path / "t.jsonl") as capture:
        torch.ones(2).sin()
        with capture._recorder.pending.lock:
            # as a handler that interrupts the description of a call
            capture.close()
    assert not is_in_torch_dispatch_mode()
    assert len(load(tmp_path / "t.jsonl", partial=False).calls) == 2


def run_program(name: str, mode: str, folder: Path) -> tuple[int, str]:
    """Run a corpus program under `opcapture`; return its exit status and output."""
    command = [str(Path(sys.executable).with_name("opcapture")), "-o", "t.jsonl", "--force", *OPTIONS[mode]]
    done = subprocess.run(
        [*command, "--", str(PROGRAMS / name)], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    return done.returncode, done.stdout


@pytest.mark.skipif(not PROGRAMS.is_dir(), reason="the programs of the field are not there")
@pytest.mark.slow
@pytest.mark.parametrize("mode", OPTIONS)
@pytest.mark.parametrize("name", ["p31_threads.py", "p32_signals.py"])
def test_programs_with_threads_and_signals_run_unchanged(tmp_path: Path, name: str, mode: str) -> None:
    command = [sys.executable, str(PROGRAMS / name)]
    plain = [subprocess.run(command, capture_output=True, text=True, check=False) for _ in range(3)]
    # torch's own threads abort many runs of p31 at exit, without a capture too
    assert {done.returncode for done in plain} <= {0, -signal.SIGABRT}
    for _ in range(3):
        status, output = run_program(name, mode, tmp_path)
        assert status in {0, *(done.returncode for done in plain)}
        assert output == plain[0].stdout
        if (tmp_path / "t.jsonl").exists():
            assert validate(tmp_path / "t.jsonl").findings == []
