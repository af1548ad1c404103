"""Failures of recording on demand: in the agent, in clients that disconnect, and in untrusted processes that answer."""

import errno
import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from programs import program_path, receive_ctrl_c, run_python, wait_for
from services import SERVER, ask, environment, on_demand, running, short_name

from opgrip.capture.on_demand import verbs
from opgrip.capture.on_demand.agent import Agent
from opgrip.capture.on_demand.protocol import ABOUT, DONE, REFUSED, STOP, TELL, make_folder
from opgrip.capture.on_demand.settings import AgentSettings
from opgrip.capture.on_demand.verbs import RecordableProcess, converse, find_process, processes, record
from opgrip.cli.progress import Reporter
from opgrip.errors import UserError
from opgrip.traces import load

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
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_name(tmp_path)))
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


@pytest.mark.slow
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


RECORDED = {"answer": DONE, "file": "t.jsonl", "steps": 1, "calls": 2, "signatures": 3, "dropped": 0, "bytes": 4}


@pytest.fixture
def socket_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_name(tmp_path)))
    return make_folder()


@contextmanager
def answering(socket_folder: Path, *answers: object, pid: int = 0) -> Iterator[RecordableProcess]:
    """Yield a process that sends `answers` to every request; without answers it stays silent."""
    path = socket_folder / f"{pid or os.getpid()}-ab.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def serve() -> None:
            # accept until the socket is closed
            with suppress(OSError):
                while True:
                    link, _ = listener.accept()
                    with link, suppress(BrokenPipeError):
                        link.recv(1 << 12)
                        for answer in answers:
                            link.sendall(answer if isinstance(answer, bytes) else json.dumps(answer).encode() + b"\n")
                        if not answers:
                            link.recv(1)

        threading.Thread(target=serve, daemon=True).start()
        try:
            yield RecordableProcess(pid or os.getpid(), path, {})
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            path.unlink()


def names_in(socket_folder: Path) -> list[str]:
    # processes of another folder belong to other tests
    return [item.name for item in processes() if item.socket.parent == socket_folder]


def test_socket_of_another_process_or_user_is_not_used(socket_folder: Path) -> None:
    about = {"answer": ABOUT, "name": "me"}
    with answering(socket_folder, about):
        assert names_in(socket_folder) == ["me"]
    with answering(socket_folder, about, pid=os.getppid()) as other:
        assert names_in(socket_folder) == []
        with pytest.raises(UserError, match="cannot be reached: its socket was opened by another process"):
            list(converse(other, TELL))


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another user")
def test_socket_folder_of_another_owner_is_refused(socket_folder: Path) -> None:
    with answering(socket_folder, {"answer": ABOUT, "name": "me"}) as here:
        os.chown(socket_folder, 54321, -1)
        with pytest.raises(UserError, match="its socket was opened by another process"):
            list(converse(here, TELL))


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ({**RECORDED, "steps": "3"}, r"Expected `int`, got `str` - at `\$\.steps`"),
        ({**RECORDED, "signatures": 1 << 80}, "signatures"),
        ({**RECORDED, "file": ["\x1b[2J"]}, r"got `array` - at `\$\.file`"),
        ({**RECORDED, "notes": [1]}, r"Expected `str`, got `int` - at `\$\.notes\[0\]`"),
        ({"answer": DONE, "file": "t.jsonl"}, "`steps` of the recording is missing"),
        (b"\xff\n", "cannot be read"),
        (b"[1]\n", r"a message is not a JSON object: \[1\]"),
    ],
)
def test_malformed_answer_is_reported_in_one_line(socket_folder: Path, answer: Any, reason: str) -> None:
    with answering(socket_folder, answer) as here, pytest.raises(UserError, match=reason) as error:
        record(here, {}, Reporter("test"))
    assert str(error.value).startswith(f"the answer of process {os.getpid()} cannot be read: ")
    assert "\n" not in str(error.value)
    assert "\x1b" not in str(error.value)


def test_answer_of_a_process_cannot_control_the_terminal(
    socket_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    strange = "\x1b]0;x\x07\nopcapture: all is well"
    with answering(socket_folder, {**RECORDED, "file": strange, "notes": [strange]}) as here:
        record(here, {}, Reporter("test"))
    output = capsys.readouterr().err
    assert output.count("\n") == 2
    assert "\x1b" not in output
    with answering(socket_folder, {"answer": REFUSED, "why": strange}) as here, pytest.raises(UserError) as error:
        record(here, {}, Reporter("test"))
    assert str(error.value) == r"\x1b]0;x\x07\nopcapture: all is well"


@pytest.mark.parametrize("word", [TELL, STOP])
def test_unresponsive_process_is_not_waited_for(
    socket_folder: Path, monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    monkeypatch.setattr(verbs, "TELL_S", 0.1)
    with answering(socket_folder) as here, pytest.raises(UserError, match="no longer responds"):
        list(converse(here, word))


def process(pid: int, parent: int, **about: Any) -> RecordableProcess:
    return RecordableProcess(pid, Path(f"{pid}-ab.sock"), {"name": "train", "parent": parent, **about})


def test_name_means_the_process_that_started_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    listed = [process(11, 1), process(12, 11), process(13, 12)]
    monkeypatch.setattr(verbs, "processes", lambda: listed)
    assert find_process("train", None, Reporter("test")).pid == 11
    assert "which are not recorded: to record one, give its PID: 12" in capsys.readouterr().err
    assert find_process("13", None, Reporter("test")).pid == 13
    listed.append(process(14, 1))
    with pytest.raises(UserError, match="2 processes are called train: choose one by its PID: 11, 14"):
        find_process("train", None, Reporter("test"))


def test_ranks_are_chosen_by_number_or_pid(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [process(11, 10, rank=0), process(12, 11, rank=1)]
    loaders = [process(13, 11, rank=0), process(14, 12, rank=1)]
    monkeypatch.setattr(verbs, "processes", lambda: [process(10, 1, name="run"), *ranks, *loaders])
    assert find_process("train", 1, Reporter("test")).pid == 12
    assert find_process("14", None, Reporter("test")).pid == 14
    with pytest.raises(UserError, match="choose one by its PID or --rank: 11, 12"):
        find_process("train", None, Reporter("test"))
    with pytest.raises(UserError, match="no process train on this machine has rank 2"):
        find_process("train", 2, Reporter("test"))
