"""Tests of child processes: heartbeat, ways to end, and restrictions in bubblewrap."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from time import monotonic_ns
from typing import Any

import pytest
from programs import succeed

from opgrip.errors import UserError
from opgrip.platform.sandbox import (
    IDLE,
    Beat,
    Child,
    Ended,
    Heartbeat,
    answer,
    bubblewrap,
    check_bubblewrap,
    run_program,
)
from opgrip.replay import Results
from opgrip.replay.command.opreplay import main

SECOND_NS = 10**9


@pytest.fixture
def heartbeat() -> Iterator[Heartbeat]:
    with tempfile.TemporaryFile() as file:
        yield Heartbeat(file.fileno())


def place(at: Beat) -> tuple[int, int]:
    return at.item, at.part


def test_heartbeat_is_at_the_last_step(heartbeat: Heartbeat) -> None:
    assert place(heartbeat.read()) == (IDLE, IDLE)
    began = monotonic_ns()
    for case in range(100):
        heartbeat.enter(case, 7)
        assert place(Heartbeat(heartbeat.file).read()) == (case, 7)
    assert began <= heartbeat.read().since_ns <= monotonic_ns()
    heartbeat.rest()
    assert place(heartbeat.read()) == (IDLE, IDLE)


def test_heartbeat_read_while_it_is_written_is_consistent(heartbeat: Heartbeat) -> None:
    began = monotonic_ns()
    heartbeat.enter(0, 0)
    worker = os.fork()
    if not worker:
        for case in count():
            heartbeat.enter(case, 3 * case)
    try:
        last = heartbeat.read()
        cases = set()
        while monotonic_ns() - began < SECOND_NS / 4:
            at = heartbeat.read()
            assert at.part == 3 * at.item
            assert last.since_ns <= at.since_ns <= monotonic_ns()
            assert last.item <= at.item
            cases.add(at.item)
            last = at
    finally:
        os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)
    assert len(cases) > 1
    # consistent at whatever moment it was killed
    assert heartbeat.read().part == 3 * heartbeat.read().item >= last.part


def test_heartbeat_in_corrupt_memory_is_idle(heartbeat: Heartbeat) -> None:
    heartbeat.enter(3, 4)
    os.pwrite(heartbeat.file, b"\x55" * os.fstat(heartbeat.file).st_size, 0)
    assert place(heartbeat.read()) == (IDLE, IDLE)


def result_of(run: Callable[[int, int, Heartbeat], object], timeout_s: float | None = None) -> Any:
    with Child(run, timeout_s=timeout_s) as child:
        return child.result()


def test_child_answers_with_a_result_or_a_user_error() -> None:
    assert result_of(lambda source, output, heartbeat: answer(lambda report: {"sum": 3}, output)) == {"sum": 3}

    def refuse(report: object) -> dict[str, Any]:
        raise UserError("no such trace", "name another")

    with pytest.raises(UserError, match="no such trace: name another"):
        result_of(lambda source, output, heartbeat: answer(refuse, output))


@pytest.mark.parametrize(
    ("end", "status", "reason"),
    [
        (
            lambda: os.write(2, b"first\nlast words\n") and os._exit(3),
            "failed",
            "it ended its process with status 3: last words",
        ),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), "failed", "it ended its process: terminated"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "failed", "its process was killed, perhaps for lack of memory"),
        (signal.pause, "timeout", "it took longer than 0.2 s"),
    ],
    ids=["exits", "crashes", "is killed", "hangs"],
)
def test_child_that_ends_names_its_step_and_the_reason(end: Callable[[], object], status: str, reason: str) -> None:
    def run(source: int, output: int, heartbeat: Heartbeat) -> None:
        heartbeat.enter(5, 2)
        end()

    assert result_of(run, timeout_s=0.2) == Ended(5, 2, status, reason)


@pytest.mark.slow
def test_program_beyond_its_time_limit_ends_with_all_its_children() -> None:
    started = "import subprocess, sys; print(subprocess.Popen(['sleep', '600']).pid, flush=True); sys.stdin.read(); "
    finished = run_program([sys.executable, "-c", f"{started} import signal; signal.pause()"], timeout_s=1)
    assert finished.status is None
    with pytest.raises(ProcessLookupError):
        while True:
            os.kill(int(finished.output), 0)


PROBE = """
import socket, sys, tempfile
from pathlib import Path
from opgrip.platform.sandbox import answer, receive_request

request, _, output = receive_request()
failures = []
for attempt in (
    lambda: Path(request["outside"]).write_text("x"),
    lambda: socket.create_connection(("127.0.0.1", request["port"]), timeout=5),
):
    try:
        attempt()
        failures.append("")
    except OSError as error:
        failures.append(type(error).__name__)
Path(request["inside"]).write_text("kept")
with tempfile.TemporaryFile():
    pass
answer(lambda report: {"failures": failures}, output)
"""


def has_bubblewrap() -> bool:
    try:
        check_bubblewrap()
    except UserError:
        return False
    return True


bubblewrap_only = pytest.mark.skipif(
    not has_bubblewrap(), reason="no bubblewrap that can confine processes: make browser"
)


@bubblewrap_only
def test_sandboxed_child_has_no_network_and_writes_only_to_its_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "probe_of_sandbox.py").write_text(PROBE)
    (tmp_path / "mine").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as server:
        request = {
            "outside": str(tmp_path / "x"),
            "inside": str(tmp_path / "mine" / "y"),
            "port": server.getsockname()[1],
        }
        with Child("probe_of_sandbox", request, confined=[str(tmp_path / "mine")]) as child:
            assert child.result() == {"failures": ["OSError", "PermissionError"]}
        with Child("probe_of_sandbox", request) as child:
            assert child.result() == {"failures": ["", ""]}
    assert (tmp_path / "mine" / "y").read_text() == "kept"


ESCAPES = """
import ctypes, json, os, socket, sys
from pathlib import Path

outside, hidden, parent = sys.argv[1:]
datagram = outside + "/datagram"
libc = ctypes.CDLL(None, use_errno=True)
NEW_USER, NEW_MOUNTS, REMOUNT_BIND, KEYCTL = 0x10000000, 0x20000, 32 | 4096, {"x86_64": 250, "aarch64": 219}

def call(function, *args):
    if function(*args) < 0:
        raise OSError(ctypes.get_errno(), "")

attempts = {
    "file": lambda: Path(outside, "file").write_text("x"),
    "remount": lambda: call(libc.mount, None, b"/", None, REMOUNT_BIND, None),
    "namespace": lambda: call(libc.unshare, NEW_USER | NEW_MOUNTS),
    "keys": lambda: call(libc.syscall, KEYCTL[os.uname().machine], 0, -3, 1),
    "host's process": lambda: os.kill(int(parent), 0),
    "hidden folder": lambda: os.listdir(hidden),
    "stream": lambda: socket.socket(socket.AF_UNIX).connect(outside + "/stream"),
    "datagram": lambda: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b"x", datagram),
    "pair": lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendmsg([b"x"], [], 0, datagram),
}
ends = {}
for name, attempt in attempts.items():
    try:
        attempt()
        ends[name] = ""
    except OSError as error:
        ends[name] = type(error).__name__
# both are the sandbox's own
Path("/dev/shm/opgrip-escape").write_text("x")
Path("/tmp/opgrip-escape").write_text("x")
# asyncio and signals need it
pair = socket.socketpair()
pair[0].send(b"x")
assert pair[1].recv(1) == b"x"
devices = [path.name for path in Path("/dev").iterdir() if path.is_block_device()]
capabilities = {line.split()[1] for line in open("/proc/self/status") if line.startswith("Cap")}
print(json.dumps([ends, devices, sorted(capabilities), os.getuid()]))
"""


@bubblewrap_only
@pytest.mark.parametrize("user", [None, 65534], ids=["own user", "another user"])
def test_sandbox_stops_each_known_way_out(user: int | None) -> None:
    python = sys.executable if user is None else "/usr/bin/python3"
    if not Path(python).exists() or (user is not None and os.getuid() != 0):
        pytest.skip("only root can become another user, to run a Python that every user can run")
    with tempfile.TemporaryDirectory() as outside, tempfile.TemporaryDirectory() as hidden, ExitStack() as stack:
        Path(outside).chmod(0o755)
        for name, kind in (("stream", socket.SOCK_STREAM), ("datagram", socket.SOCK_DGRAM)):
            server = stack.enter_context(socket.socket(socket.AF_UNIX, kind))
            server.bind(f"{outside}/{name}")
            Path(outside, name).chmod(0o777)
            if kind == socket.SOCK_STREAM:
                server.listen()
        words, files = stack.enter_context(bubblewrap([], [outside]))
        command = [*words, python, "-c", ESCAPES, outside, hidden, str(os.getpid())]
        done = subprocess.run(command, pass_fds=files, user=user, capture_output=True, text=True, check=True)
        assert {*os.listdir(outside)} == {"stream", "datagram"}
    refused = dict.fromkeys(["remount", "namespace", "keys", "stream", "datagram", "pair"], "PermissionError")
    others = {"file": "OSError", "host's process": "ProcessLookupError", "hidden folder": "FileNotFoundError"}
    assert json.loads(done.stdout) == [refused | others, [], ["0" * 16], 65534]
    assert not Path("/dev/shm/opgrip-escape").exists()
    assert not Path("/tmp/opgrip-escape").exists()


@bubblewrap_only
@pytest.mark.slow
@pytest.mark.parametrize("options", [("--mode", "eager,compile"), ("--sequence",)], ids=" ".join)
def test_opreplay_in_the_sandbox_measures_as_outside(
    tiny_trace: Path, tmp_path: Path, options: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    few = () if "--sequence" in options else ("--top", "2", "--warmup", "0")
    words = [tiny_trace, *few, "--iterations", "2", *options, "-o", tmp_path / "r.json"]
    succeed("opreplay", *words, "--sandbox")
    assert {*Results.load(tmp_path / "r.json").frame["status"]} <= {"ok", "contended"}


@pytest.mark.parametrize(
    ("program", "problem"),
    [
        (None, "--sandbox needs bubblewrap (bwrap), which is not installed: apt install bubblewrap"),
        (
            "echo setting up uid map: Permission denied >&2; exit 1",
            "bwrap cannot confine processes here: setting up uid ",
        ),
    ],
)
def test_unavailable_sandbox_is_refused(
    tiny_trace: Path,
    tmp_path: Path,
    program: str | None,
    problem: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if program is not None:
        (tmp_path / "bwrap").write_text(f"#!/bin/sh\n{program}\n")
        (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main([str(tiny_trace), "--sandbox"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"opreplay: error: {problem}")
