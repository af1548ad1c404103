"""Child processes, their restrictions in bubblewrap, and untrusted candidates, whose cheats do not pay."""

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
from time import monotonic_ns, sleep
from typing import Any

import cheats
import pytest
import torch
from judge_candidates import FOLDER
from programs import run_command, succeed

from opgrip import Capture, judge
from opgrip.errors import UserError
from opgrip.platform.peaks import Level, Peaks
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
from opgrip.replay.analyses.candidates import held_to_limits
from opgrip.replay.command.opreplay import main
from opgrip.replay.command.run_requests import request_with
from opgrip.replay.results.judgement import CandidateColumns, judge_rows
from opgrip.replay.results.results import Result
from opgrip.replay.run import untrusted
from opgrip.replay.run.measure import measure_cases
from opgrip.replay.run.untrusted import UntrustedCall
from opgrip.replay.run.workload import load_workload

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


SOFTMAX = "aten._softmax.default"
DROPOUT = "aten.native_dropout.default"
NORM = "aten.native_layer_norm.default"
RUNS = 16
CEILINGS = Peaks(
    ("a processor",), "cpu", 1, (Level("memory", None, 1, {1: 10.0}),), {"float32": {1: 100.0}}, 1.0, 0.5, "2.0", ""
)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("untrusted") / "step.jsonl"
    with Capture(path):
        torch.softmax(torch.randn(32, 64), -1)
        torch.native_dropout(torch.randn(32, 64), 0.25, True)
        torch.randn(256, generator=torch.Generator())
        torch.argmax(torch.randn(40), 0)
    yield path
    for candidate in list(untrusted._processes):
        untrusted.end_process(candidate)


def row_of(
    trace: Path, name: str, op: str = SOFTMAX, ceilings: Peaks | None = None, file: str = cheats.__file__
) -> Result:
    """Return the judged row of a candidate of a file, judged in processes of this one."""
    text = f"{op}={file}:{name}"
    options = {"candidate": [text], "untrusted": True, "iterations": RUNS, "cache": "warm", "threads": 1}
    workload = load_workload(request_with(str(trace), **options))
    (rows,) = measure_cases(workload.cases, workload)
    # the next judgement must not find what this one left
    untrusted.end_process(workload.request.candidates.candidate[0])
    if ceilings is not None:
        rows = held_to_limits(rows, ceilings, workload)
    return judge_rows(rows, "eager", None, "", {})[-1]


def verdict_on(trace: Path, name: str, op: str = SOFTMAX) -> tuple[str | None, str]:
    row = row_of(trace, name, op)
    return CandidateColumns.of(row).verdict, str(row.error)


# cheats, with a part of the reason why they are wrong; empty if they are right and as slow as their twin, None if
# chance decides which of the two
CHEATS = {
    "cached_by_identity": "elements differ",
    "cached_by_address": None,
    "cached_by_version": "elements differ",
    "cached_by_value": "",
    "lazy": "output is a Lazy, not a plain tensor",
    "lazy_without_check": "",
    "left_on_a_thread": None,
    "left_on_a_python_thread": None,
    "left_on_a_daemon": "differ",
    "with_patched_clock": "it replaced time.perf_counter_ns",
    "with_clock_of_the_process": "",
    "with_patched_elapsed_time": "it replaced torch.cuda.Event.elapsed_time",
    "with_patched_synchronize": "it replaced torch.cuda.synchronize",
    "many_calls_at_once": "differ",
    "from_the_reference": "differ",
    "only_first_calls": "output 0",
    "only_first_values": "in a timed run: output 0",
    "less_precise": "elements differ",
    "same_memory": "it returns the memory of an earlier result",
    "continued_by_timer": "after its process had been stopped",
    "forged_answer": "its ",
}
QUICK = {"only_first_values"}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in CHEATS]
)
def test_cheat_gets_no_better_verdict_than_its_honest_twin(trace: Path, name: str) -> None:
    verdict, reason = verdict_on(trace, name)
    allowed = {"wrong", "slower"} if CHEATS[name] is None else {"wrong" if CHEATS[name] else "slower"}
    assert verdict in allowed, reason
    assert (CHEATS[name] or "") in reason


# cheats of the benchmark that once gained something, with the reason why they are wrong
HELD_OUT = {
    "softmax_in_one_memory": (SOFTMAX, "it returns the memory of an earlier result"),
    "dropout_with_one_mask": (DROPOUT, "output 1 has the random numbers of an earlier run"),
}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", HELD_OUT)
def test_cheat_of_the_benchmark_is_wrong(trace: Path, name: str) -> None:
    op, reason = HELD_OUT[name]
    row = row_of(trace, name, op, file=str(FOLDER / "cheats.py"))
    assert CandidateColumns.of(row).verdict == "wrong"
    assert reason in str(row.error)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "is_right"), [("argmax", True), ("argmax_kept_by_shape", False)])
def test_index_is_compared_for_values_in_another_order(trace: Path, name: str, is_right: bool) -> None:
    assert (row_of(trace, name, "aten.argmax.default").error is None) == is_right


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_random_numbers_of_an_honest_candidate_do_not_depend_on_the_values(trace: Path) -> None:
    row = row_of(trace, "dropout_with_own_mask", DROPOUT, file=str(FOLDER / "cheats.py"))
    assert row.error is None


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_random_numbers_of_the_same_generator_are_not_those_of_an_earlier_run(trace: Path, tmp_path: Path) -> None:
    (tmp_path / "drawing.py").write_text("from torch import randn", encoding="utf-8")
    assert row_of(trace, "randn", "aten.randn.generator", file=str(tmp_path / "drawing.py")).error is None


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name",
    ["honest", *(pytest.param(f"honest_with_{word}", marks=pytest.mark.slow) for word in ("a_thread", "workers"))],
)
def test_honest_twin_is_right(trace: Path, name: str) -> None:
    assert verdict_on(trace, name) == ("slower", "None")


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_shortcuts_on_constant_inputs_and_scaled_values_do_not_help(tmp_path: Path) -> None:
    with Capture(tmp_path / "constant.jsonl"):
        torch.softmax(torch.full((32, 64), 0.5), -1)
    assert verdict_on(tmp_path / "constant.jsonl", "constant") == ("slower", "None")
    with Capture(tmp_path / "norm.jsonl"):
        torch.layer_norm(torch.randn(128, 256), (256,))
    assert verdict_on(tmp_path / "norm.jsonl", "normalized_up_to_a_factor", NORM) == ("slower", "None")


@pytest.mark.timeout(300)
@pytest.mark.slow
@pytest.mark.parametrize(("ceilings", "verdict"), [(CEILINGS, "wrong"), (None, "faster")])
def test_time_below_the_limit_of_the_machine_is_wrong(
    trace: Path, monkeypatch: pytest.MonkeyPatch, ceilings: Peaks | None, verdict: str
) -> None:
    # this process's clock does not bound calls that take less time than requests vary
    monkeypatch.setattr(untrusted, "MARGIN", 1e9)
    row = row_of(trace, "with_stopped_clock", ceilings=ceilings)
    assert CandidateColumns.of(row).verdict == verdict, row.error


def test_detached_process_is_stopped(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # in bubblewrap, processes have other ids
    monkeypatch.setattr(untrusted, "unconfined", lambda: "not installed")
    options = {"candidate": [f"{SOFTMAX}={cheats.__file__}:detached"], "untrusted": True}
    workload = load_workload(request_with(str(trace), **options))
    (candidate,) = workload.request.candidates.candidate
    call = UntrustedCall(candidate, workload, workload.cases[0].signature, {})
    (result,) = call(torch.zeros(2, 2), -1, False)
    path = Path(f"/proc/{int(result[0, 0])}/stat")
    assert ") T " in path.read_text()
    untrusted.end_process(candidate)
    for _ in range(1000):
        # the kernel ends a killed process a moment later
        try:
            is_over = ") Z " in path.read_text()
        except OSError:
            is_over = True
        if is_over:
            break
        sleep(0.01)
    assert is_over


@pytest.mark.timeout(300)
@pytest.mark.slow
@pytest.mark.parametrize("is_honest", [True, False])
def test_candidates_of_samples_are_judged(tmp_path: Path, is_honest: bool) -> None:
    returned = "found" if is_honest else "found.roll(1)"
    lines = ["from opgrip.samples.coders.delta2bbox import delta2bbox", "", "", "def mine(*args, **kwargs):"]
    lines += ["    found = delta2bbox(*args, **kwargs)", f"    return {returned}", ""]
    # also a module of Python
    (tmp_path / "json.py").write_text("\n".join(lines), encoding="utf-8")
    candidate = {"sample:delta2bbox": f"{tmp_path / 'json.py'}:mine"}
    results = judge(candidate, "sample:delta2bbox", untrusted=True, iterations=3)
    assert results.is_right == is_honest, str(results)


def test_functions_of_this_process_cannot_be_untrusted(trace: Path) -> None:
    with pytest.raises(UserError, match="name them by file and function"):
        judge({SOFTMAX: torch.softmax}, trace, untrusted=True)


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_command_judges_an_untrusted_candidate(trace: Path) -> None:
    words = ["--candidate", f"{SOFTMAX}={cheats.__file__}:less_precise", "--untrusted", "--iterations", "2"]
    done = run_command("opreplay", trace, *words)
    assert done.returncode == 1, done.stderr
    assert "wrong on 1 of 1 signature" in done.stdout
    assert ("bubblewrap" in done.stderr) == (untrusted.unconfined() is not None)
