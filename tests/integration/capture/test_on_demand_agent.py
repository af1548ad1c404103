"""Tests of an agent that survives failures in its process and in its clients."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from programs import run_python
from services import environment, short_name

from opgrip.capture.on_demand.agent import Agent
from opgrip.capture.on_demand.settings import AgentSettings
from opgrip.capture.on_demand.verbs import processes

CHILDREN = """
import multiprocessing, os
from opgrip.capture.on_demand.agent import agent_here, start_agent
from opgrip.capture.on_demand.protocol import pid_of, sockets
from opgrip.capture.on_demand.settings import AgentSettings

def child():
    agent = start_agent(AgentSettings("child"))
    print(pid_of(agent.path) == os.getpid(), agent.path.exists(), flush=True)

if __name__ == "__main__":
    agent = start_agent(AgentSettings("parent"))
    for method in ("fork", "spawn", "forkserver"):
        process = multiprocessing.get_context(method).Process(target=child)
        process.start()
        process.join()
        print([pid_of(path) for path in sockets() if path.parent == agent.path.parent] == [os.getpid()], flush=True)
"""


@pytest.fixture
def sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_name(tmp_path)))
    return tmp_path / "opgrip"


@pytest.fixture
def agent(sockets: Path) -> Iterator[Agent]:
    agent = Agent(AgentSettings("here"))
    yield agent
    agent.close()


def failing_first(function: Callable[..., Any], times: int, error: Exception, of: str = "") -> Callable[..., Any]:
    """Return a method that fails the first `times` times on objects whose name contains `of`."""
    errors = [error] * times

    def failing(self: Any, *args: Any) -> Any:
        if errors and of in getattr(self, "name", ""):
            raise errors.pop()
        return function(self, *args)

    return failing


def names() -> list[str]:
    # agents in other folders belong to other tests
    own = Path(os.environ["XDG_RUNTIME_DIR"]) / "opgrip"
    return [item.name for item in processes() if item.pid == os.getpid() and item.socket.parent == own]


def test_agent_recovers_from_too_many_open_files(agent: Agent, monkeypatch: Any) -> None:
    error = OSError(errno.EMFILE, "Too many open files")
    monkeypatch.setattr(socket.socket, "accept", failing_first(socket.socket.accept, 2, error))
    agent.start()
    assert names() == ["here"]
    assert agent.failures == {"OSError: [Errno 24] Too many open files": 2}


def test_multiprocessing_children_leave_no_socket(tmp_path: Path) -> None:
    (tmp_path / "children.py").write_text(CHILDREN, encoding="utf-8")
    done = run_python("children.py", cwd=tmp_path, env=environment(tmp_path), fresh=True)
    assert done.stdout.splitlines() == ["True True", "True"] * 3, done.stderr


def test_stale_socket_with_the_same_process_number_is_ignored(agent: Agent) -> None:
    agent.start()
    left = agent.path.with_name(f"{os.getpid()}-left.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(left))
    assert [process.socket for process in processes()] == [agent.path]
    assert [path.name for path in agent.path.parent.iterdir()] == [agent.path.name]
