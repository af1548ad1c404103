"""Checks of answers from untrusted processes that listen at a socket."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from services import short_name

from opgrip.capture.on_demand import verbs
from opgrip.capture.on_demand.protocol import ABOUT, DONE, REFUSED, STOP, TELL, make_folder
from opgrip.capture.on_demand.verbs import RecordableProcess, converse, find_process, processes, record
from opgrip.cli.progress import Reporter
from opgrip.errors import UserError

RECORDED = {"answer": DONE, "file": "t.jsonl", "steps": 1, "calls": 2, "signatures": 3, "dropped": 0, "bytes": 4}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_name(tmp_path)))
    return make_folder()


@contextmanager
def answering(folder: Path, *answers: object, pid: int = 0) -> Iterator[RecordableProcess]:
    """Yield a process that sends `answers` to every request; without answers it stays silent."""
    path = folder / f"{pid or os.getpid()}-ab.sock"
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


def names(folder: Path) -> list[str]:
    # processes of another folder belong to other tests
    return [item.name for item in processes() if item.socket.parent == folder]


def test_socket_of_another_process_or_user_is_not_used(folder: Path) -> None:
    about = {"answer": ABOUT, "name": "me"}
    with answering(folder, about):
        assert names(folder) == ["me"]
    with answering(folder, about, pid=os.getppid()) as other:
        assert names(folder) == []
        with pytest.raises(UserError, match="cannot be reached: its socket was opened by another process"):
            list(converse(other, TELL))


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another user")
def test_socket_folder_of_another_owner_is_refused(folder: Path) -> None:
    with answering(folder, {"answer": ABOUT, "name": "me"}) as here:
        os.chown(folder, 54321, -1)
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
def test_malformed_answer_is_reported_in_one_line(folder: Path, answer: Any, reason: str) -> None:
    with answering(folder, answer) as here, pytest.raises(UserError, match=reason) as error:
        record(here, {}, Reporter("test"))
    assert str(error.value).startswith(f"the answer of process {os.getpid()} cannot be read: ")
    assert "\n" not in str(error.value)
    assert "\x1b" not in str(error.value)


def test_answer_of_a_process_cannot_control_the_terminal(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    strange = "\x1b]0;x\x07\nopcapture: all is well"
    with answering(folder, {**RECORDED, "file": strange, "notes": [strange]}) as here:
        record(here, {}, Reporter("test"))
    output = capsys.readouterr().err
    assert output.count("\n") == 2
    assert "\x1b" not in output
    with answering(folder, {"answer": REFUSED, "why": strange}) as here, pytest.raises(UserError) as error:
        record(here, {}, Reporter("test"))
    assert str(error.value) == r"\x1b]0;x\x07\nopcapture: all is well"


@pytest.mark.parametrize("word", [TELL, STOP])
def test_unresponsive_process_is_not_waited_for(folder: Path, monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    monkeypatch.setattr(verbs, "TELL_S", 0.1)
    with answering(folder) as here, pytest.raises(UserError, match="no longer responds"):
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
