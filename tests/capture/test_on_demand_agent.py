"""An agent stays one, whatever its process and those who ask it run into."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from services import short_name

from opgrip.capture.on_demand.agent import MOST_CONNECTIONS, Agent
from opgrip.capture.on_demand.client import processes
from opgrip.capture.on_demand.settings import Settings


@pytest.fixture
def sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_name(tmp_path)))
    return tmp_path / "opgrip"


@pytest.fixture
def agent(sockets: Path) -> Iterator[Agent]:
    agent = Agent(Settings("here"))
    yield agent
    agent.close()


def failing_first(function: Callable[..., Any], times: int, error: Exception, of: str = "") -> Callable[..., Any]:
    """A method that fails so many times, where its object has the name."""
    errors = [error] * times

    def failing(self: Any, *args: Any) -> Any:
        if errors and of in getattr(self, "name", ""):
            raise errors.pop()
        return function(self, *args)

    return failing


def names() -> list[str]:
    return [item.name for item in processes() if item.pid == os.getpid()]


def test_a_process_that_had_too_many_files_open_can_be_asked_again(agent: Agent, monkeypatch: Any) -> None:
    error = OSError(errno.EMFILE, "Too many open files")
    monkeypatch.setattr(socket.socket, "accept", failing_first(socket.socket.accept, 2, error))
    agent.start()
    assert names() == ["here"]
    assert agent.failures == {"OSError: [Errno 24] Too many open files": 2}


def test_conversations_for_which_there_was_no_thread_leave_room_for_others(agent: Agent, monkeypatch: Any) -> None:
    agent.start()
    error = RuntimeError("can't start new thread")
    start = failing_first(threading.Thread.start, MOST_CONNECTIONS, error, of="opgrip-request")
    monkeypatch.setattr(threading.Thread, "start", start)
    for _ in range(MOST_CONNECTIONS):
        with socket.socket(socket.AF_UNIX) as link:
            link.connect(str(agent.path))
            assert link.recv(1) == b""
    assert names() == ["here"]
    assert agent.failures == {"RuntimeError: can't start new thread": MOST_CONNECTIONS}
