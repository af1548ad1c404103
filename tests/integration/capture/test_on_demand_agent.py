"""Tests of an agent that survives failures in its process and in its clients."""

from __future__ import annotations

import errno
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from programs import run_python
from services import environment, short_name

from opgrip.capture.on_demand import agent as agent_module
from opgrip.capture.on_demand.agent import MOST_CONNECTIONS, Agent, listen_to, start_agent
from opgrip.capture.on_demand.settings import AgentSettings
from opgrip.capture.on_demand.verbs import processes
from opgrip.errors import UserError
from opgrip.traces import load

FORKS = """
import os, signal, time, torch, opgrip.capture
from pathlib import Path
from opgrip.capture.on_demand.settings import AgentSettings
from opgrip.capture.on_demand.autostart import start

start(AgentSettings("forks", str(Path("s-%p.jsonl").absolute()), steps=1, warmup=0, signal="USR1"))
class Forks(torch.nn.Module):
    child = None
    def forward(self, x):
        if self.child is None:
            self.child = os.fork()
        return x.cos()
net = Forks().eval()
asked = opgrip.capture.trigger(steps=1)
net(torch.ones(2))
if net.child == 0:
    os.kill(os.getpid(), signal.SIGUSR1)
    until = time.monotonic() + 60
    while not Path(f"s-{os.getpid()}.jsonl").exists() and time.monotonic() < until:
        net(torch.ones(2))
        time.sleep(0.01)
    os._exit(0)
os.waitpid(net.child, 0)
asked.wait(60)
print(os.getpid(), net.child)
"""
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


def test_agent_recovers_if_no_thread_can_start_for_a_request(agent: Agent, monkeypatch: Any) -> None:
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


@pytest.mark.slow
def test_signal_in_a_forked_process_reaches_its_own_agent(tmp_path: Path) -> None:
    done = run_python("-c", FORKS, cwd=tmp_path, env=environment(tmp_path))
    parent, child = done.stdout.split()
    assert {path.name for path in tmp_path.glob("*.jsonl")} == {f"s-{parent}.jsonl", f"s-{child}.jsonl"}, done.stderr
    assert "recording already" not in done.stderr
    assert load(tmp_path / f"s-{child}.jsonl", partial=False).header["pid"] == int(child)


def test_failed_thread_start_after_a_signal_does_not_reach_the_program(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    listen_to(signal.SIGUSR2)
    try:
        start = failing_first(threading.Thread.start, 1, RuntimeError("can't start new thread"), of="opgrip-recording")
        monkeypatch.setattr(threading.Thread, "start", start)
        signal.raise_signal(signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    assert capfd.readouterr().err == "opgrip: no trace was written: RuntimeError: can't start new thread\n"


def test_agent_can_start_after_a_failed_attempt(sockets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_module, "_agent", None)
    error = RuntimeError("can't start new thread")
    monkeypatch.setattr(threading.Thread, "start", failing_first(threading.Thread.start, 1, error, of="opgrip-agent"))
    with pytest.raises(UserError, match="an agent cannot start in this process"):
        start_agent(AgentSettings("here"))
    assert not list(sockets.iterdir())
    agent = start_agent(AgentSettings("here"))
    assert names() == ["here"]
    agent.close()


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
