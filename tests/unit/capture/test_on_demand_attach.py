"""Ways to attach to a running process, and their failures."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from opgrip.capture.on_demand import client as attach_module
from opgrip.capture.on_demand.client import attach
from opgrip.errors import UserError

HEARS = """
def leave(number, frame):
    open({left!r}, "w").close()
    sys.exit()
signal.signal(signal.SIGINT, leave)
"""
HEARS_NOT = "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
HANGS = "time.sleep(600)\n"


@pytest.fixture
def debugger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that replaces gdb by a program."""
    monkeypatch.setattr(attach_module, "DEBUGGER_S", 1.0)
    monkeypatch.setattr(attach_module, "LEAVE_S", 1.0)
    # no agent exists until gdb, or its replacement, has run
    answers = iter([False])
    monkeypatch.setattr(attach_module, "_has_agent", lambda pid: next(answers, True))

    def make(text: str) -> None:
        path = tmp_path / "gdb"
        path.write_text(f"#!{sys.executable} -IS\nimport signal, sys, time\n{text}", encoding="utf-8")
        path.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))

    return make


@pytest.mark.slow
@pytest.mark.skipif(hasattr(sys, "remote_exec"), reason="this Python asks no debugger first")
def test_hanging_debugger_is_detached_or_killed(debugger: Callable[[str], None], tmp_path: Path) -> None:
    debugger(HEARS.format(left=str(tmp_path / "left")) + HANGS)
    with pytest.raises(UserError, match=r"gdb did not finish within 1\.0 s, and was detached"):
        attach(os.getpid())
    assert (tmp_path / "left").exists()
    debugger(HEARS_NOT + HANGS)
    with pytest.raises(UserError, match="gdb did not detach and was killed"):
        attach_module._inject_by_debugger(os.getpid())


def test_debugger_is_used_if_the_target_runs_an_older_python(
    debugger: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def remote_exec(pid: int, script: str) -> Any:
        raise RuntimeError("the target runs another version")

    monkeypatch.setattr(attach_module, "sys", SimpleNamespace(remote_exec=remote_exec))
    debugger("print('opgrip: done')")
    assert attach(os.getpid()).endswith("has an agent now, by gdb")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match="the target runs another version"):
        attach_module._inject(os.getpid())
