"""Programs and engines that run at full speed until a client requests a recording."""

import json
import os
import signal
import socket
import stat
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from optional import needs
from programs import run_python, succeed, wait_for
from services import ask, environment, on_demand, python, running, short_name
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

import opgrip.capture
from opgrip.capture.on_demand.agent import marks
from opgrip.capture.on_demand.session import StepCapture
from opgrip.capture.on_demand.settings import check_pattern, recording_path
from opgrip.capture.start import main
from opgrip.capture.torch_compat.compiler_private import stance_here
from opgrip.errors import UserError
from opgrip.traces import Trace, load
from opgrip.traces.analysis.validation import validate

SERVER = """
import sys, threading, time, torch
from torch import nn
net = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU())).eval()
call, failed = nn.Module.__call__, []
def serve():
    x = torch.ones(3, 4)
    with torch.no_grad():
        while True:
            try:
                net(x)
            except Exception as error:
                failed.append(error)
            time.sleep(0.002)
threads = [threading.Thread(target=serve, daemon=True) for _ in range(3)]
for thread in threads:
    thread.start()
print("ready", flush=True)
while True:
    time.sleep(0.05)
    is_on = torch.utils._python_dispatch.is_in_torch_dispatch_mode()
    print(len(failed), is_on, nn.Module.__call__ is call, flush=True)
"""
# operators that one call of the server's network runs
STEP = ["aten.t.default", "aten.addmm.default", "aten.t.default", "aten.addmm.default", "aten.relu.default"]


def ops(path: Path) -> dict[str, list[str]]:
    """Return the operators that each thread of a trace called, without marks of steps."""
    calls = load(path, partial=False).calls
    calls = calls[~calls["op"].astype(str).str.startswith("profiler.")].astype({"op": str, "thread": str})
    return {str(thread): own["op"].tolist() for thread, own in calls.groupby("thread")}


@pytest.fixture
def server() -> Iterator[Path]:
    with TemporaryDirectory() as name:
        folder = Path(name).resolve()
        (folder / "server.py").write_text(SERVER, encoding="utf-8")
        yield folder


def test_steps_of_running_threads_are_recorded_completely_and_hooks_removed(server: Path) -> None:
    with running(server, *on_demand("--", "server.py")) as process:
        listed = ask(server, "list")
        assert listed.stdout.split()[-3:] == ["--on-demand", "--", "server.py"]
        # only its user can open the socket
        (path,) = (server / "opgrip").glob("*.sock")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        done = ask(server, "trigger", "server", "--steps", "4", "-o", "t.jsonl")
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == [str(server / "t.jsonl")]
        trace = load(server / "t.jsonl", partial=False)
        assert sorted(trace.labels.index) == [f"opgrip step {number}" for number in (1, 2, 3, 4)]
        for called in ops(server / "t.jsonl").values():
            assert called == STEP * (len(called) // len(STEP))
        assert set(trace.calls["module"]) == {"", "0", "1.0", "1.1"}
        before = len((server / "said.txt").read_text())
        wait_for(lambda: len((server / "said.txt").read_text()) > before + 100, process)
        last = (server / "said.txt").read_text().splitlines()[-2]
        assert last == "0 False True"
        # a file of that name exists, so another name is used
        assert ask(server, "trigger", process.pid, "--steps", "1", "-o", "t.jsonl").stdout.split() == [
            str(server / "t.2.jsonl")
        ]
    # the process was killed, and the next client cleans up
    assert "no process can be asked" in ask(server, "list").stderr
    assert not list((server / "opgrip").glob("*.sock"))


def test_socket_folder_that_others_can_enter_is_refused(server: Path) -> None:
    (server / "opgrip").mkdir()
    (server / "opgrip").chmod(0o755)
    code = "from opgrip.capture.on_demand.protocol import make_folder, check_private\nfrom pathlib import Path\n"
    code += "print(make_folder() != Path('opgrip').absolute())\ncheck_private(Path('opgrip'))"
    done = subprocess.run(python("-c", code), capture_output=True, text=True, cwd=server, env=environment(server))
    assert done.stdout.split() == ["True"]
    assert "is open to other users" in done.stderr


@pytest.mark.slow
def test_hanging_or_malformed_clients_do_not_disturb_the_agent(server: Path) -> None:
    with running(server, *on_demand("--", "server.py")):
        (path,) = (server / "opgrip").glob("*.sock")
        links = [socket.socket(socket.AF_UNIX) for _ in range(5)]
        for link in links:
            link.connect(str(path))
        hanging, *others = links
        for link, rubbish in zip(
            others, (b"\xff\x00\n", b"[" * 60000 + b"\n", b"x" * 1000000, b'{"protocol": 99}\n'), strict=True
        ):
            with suppress(BrokenPipeError, ConnectionResetError):
                link.sendall(rubbish)
        assert ask(server, "trigger", "server", "--steps", "1").returncode == 0
        hanging.close()
        last = (server / "said.txt").read_text().splitlines()[-2]
        assert last.startswith("0 ")


@pytest.mark.slow
def test_stopped_recording_has_the_steps_until_then(server: Path) -> None:
    with running(server, *on_demand("--", "server.py")):
        asked = threading.Thread(target=lambda: ask(server, "trigger", "server", "--steps", "1000000", "-o", "t.jsonl"))
        asked.start()
        while "recording" not in ask(server, "list").stdout.splitlines()[-2].split():
            pass
        assert "recording already" in ask(server, "trigger", "server").stderr
        ask(server, "stop", "server")
        asked.join()
        for called in ops(server / "t.jsonl").values():
            assert called == STEP * (len(called) // len(STEP))
        assert "no recording is running" in ask(server, "stop", "server").stderr


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_recordings_of_many_threads_are_whole_whenever_they_are_stopped(
    server: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (server / "many.py").write_text(SERVER.replace("range(3)", "range(50)").replace("0.002", "0.02"), encoding="utf-8")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_name(server)))
    with running(server, *on_demand("--", "many.py")) as process:
        for number in range(30):
            path, pid = server / f"t{number}.jsonl", str(process.pid)
            words = ["trigger", pid, "--steps", "1000000", "-o", str(path)]
            client = threading.Thread(target=main, args=(words,))
            client.start()
            wait_for(lambda: bool(list(server.glob(f"t{number}*.jsonl*"))), process)  # noqa: B023
            threading.Timer(0.02 * (number % 10), main, [["stop", pid]]).start()
            client.join(30)
            assert not client.is_alive()
            # a recording that is stopped before its first step writes no trace
            if path.exists():
                assert validate(path).findings == []
                assert load(path, partial=False).missing is None
        assert len(list(server.glob("t*.jsonl"))) > 20


@pytest.mark.slow
def test_signal_starts_a_recording_unless_the_program_handles_it(server: Path) -> None:
    with running(server, *on_demand("--signal", "USR1", "--steps", "1", "-o", "s.jsonl", "--", "server.py")) as process:
        process.send_signal(signal.SIGUSR1)
        wait_for((server / "s.jsonl").exists, process)
    code = "import signal; from opgrip.capture.on_demand.agent import listen_to\n"
    code += "signal.signal(signal.SIGUSR1, print); listen_to(signal.SIGUSR1)"
    assert "the program already has a handler for SIGUSR1" in run_python("-c", code).stderr


def test_program_without_torch_is_reported(tmp_path: Path) -> None:
    (tmp_path / "quiet.py").write_text("import time; print('ready'); time.sleep(100)", encoding="utf-8")
    with running(tmp_path, *on_demand("--", "quiet.py")):
        done = ask(tmp_path, "trigger", "quiet", "--wait", "0.2s")
    assert done.returncode == 2
    assert "has not loaded torch yet: try again later" in done.stderr


@pytest.mark.slow
def test_forked_process_has_a_separate_agent(tmp_path: Path) -> None:
    program = """
import os, time, torch
net = torch.nn.Linear(2, 2).eval()
with torch.no_grad():
    child = os.fork()
    print("ready")
    while True:
        net(torch.ones(1, 2) * (2 if child else 3))
        if child == 0:
            torch.ones(1).cos()
        time.sleep(0.01)
"""
    (tmp_path / "forking.py").write_text(program, encoding="utf-8")
    with running(tmp_path, *on_demand("--", "forking.py")) as process:
        wait_for(lambda: len(list((tmp_path / "opgrip").glob("*.sock"))) == 2, process)
        pids = [int(path.name.partition("-")[0]) for path in (tmp_path / "opgrip").glob("*.sock")]
        (child,) = {*pids} - {process.pid}
        errors = ask(tmp_path, "trigger", "forking", "-o", "named.jsonl").stderr
        assert f"process {process.pid} has started others with the same name" in errors
        assert f"give its PID: {child}\n" in errors
        assert load(tmp_path / "named.jsonl", partial=False).header["pid"] == process.pid
        for pid in pids:
            assert ask(tmp_path, "trigger", pid, "-o", f"{pid}.jsonl").returncode == 0
            assert len(load(tmp_path / f"{pid}.jsonl", partial=False).labels) == 3
        for pid in pids:
            if pid != process.pid:
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def own_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # the agent of this process outlives the test, and other tests must not find it
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_name(tmp_path)))
    # forget the steps that earlier tests have marked
    monkeypatch.setattr(marks, "_next", count().__next__)
    monkeypatch.setattr(marks, "_last", -1)
    return tmp_path


def test_marked_training_steps_are_recorded_completely(own_sockets: Path) -> None:
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    opgrip.capture.step()
    asked = opgrip.capture.trigger(own_sockets / "t.jsonl", steps=2)
    for _ in range(6):
        optimizer.zero_grad()
        net(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        opgrip.capture.step()
    assert asked.wait(60)
    assert asked.problem is None
    trace = load(own_sockets / "t.jsonl", partial=False)
    assert {name: int(count) for name, count in trace.labels.items()} | {} == {
        "Optimizer.zero_grad#SGD.zero_grad": 2,
        "Optimizer.step#SGD.step": 2,
        "opgrip step 1": 1,
        "opgrip step 2": 1,
    }
    assert (trace.calls["op"] == "aten.addmm.default").sum() == 2
    assert set(trace.calls["phase"]) == {"forward", "backward", "optimizer"}
    assert _get_current_dispatch_mode() is None


def test_explicit_steps_take_precedence(own_sockets: Path) -> None:
    x, net = torch.ones(2), nn.Linear(2, 2).eval()
    opgrip.capture.step()
    asked = opgrip.capture.trigger(own_sockets / "t.jsonl", steps=2, warmup=0)
    x.tan()
    for _ in range(4):
        opgrip.capture.step()
        x.sin()
        with torch.no_grad():
            net(x)
    assert asked.wait(60)
    called = ops(own_sockets / "t.jsonl")["MainThread"]
    assert called.count("aten.sin.default") == 2
    assert "aten.tan.default" not in called


def test_calls_of_the_named_module_class_are_steps(own_sockets: Path) -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.ReLU())
    asked = opgrip.capture.trigger(own_sockets / "t.jsonl", steps=2, warmup=0, step_module="ReLU")
    with torch.no_grad():
        net(torch.ones(2))
    assert asked.wait(60)
    assert ops(own_sockets / "t.jsonl")["MainThread"] == ["aten.relu.default"] * 2


def test_error_of_a_step_reaches_the_program_and_ends_the_step(own_sockets: Path) -> None:
    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.sin()
            raise ValueError("no")

    asked = opgrip.capture.trigger(own_sockets / "t.jsonl", steps=1, warmup=0)
    with pytest.raises(ValueError, match="no"):
        Fails().eval()(torch.ones(1))
    assert asked.wait(60)
    assert _get_current_dispatch_mode() is None
    assert ops(own_sockets / "t.jsonl")["MainThread"] == ["aten.sin.default"]


def test_unwritable_recording_does_not_affect_the_program(own_sockets: Path) -> None:
    asked = opgrip.capture.trigger(own_sockets / "nothere" / "t.jsonl")
    assert asked.wait(60)
    assert "does not exist" in str(asked.problem)
    asked = opgrip.capture.trigger(own_sockets / "t.jsonl", no_such_option=1)
    assert asked.wait(60)
    assert "no_such_option" in str(asked.problem)
    assert nn.ReLU()(torch.ones(1)) == 1


def test_recording_names_contain_host_process_rank_and_number(tmp_path: Path) -> None:
    path = recording_path(str(tmp_path / "a-%h-%p-%r-%n%%.jsonl"), 7)
    assert path.name == f"a-{socket.gethostname()}-{os.getpid()}-0-7%.jsonl"
    for pattern, reason in {"%q.jsonl": "%q", "t.txt": "not a valid name of a trace file"}.items():
        with pytest.raises(UserError, match=reason):
            check_pattern(pattern)


def test_file_written_meanwhile_by_another_process_is_kept(tmp_path: Path) -> None:
    capture = StepCapture(tmp_path / "t.jsonl", warmup=False)
    capture.open()
    step = capture.enter_step(True, None)
    torch.ones(3)
    capture.leave_step(step)
    (tmp_path / "t.jsonl").write_text("another's", encoding="utf-8")
    capture.close()
    assert capture.problem is None
    assert capture.path == tmp_path / "t.2.jsonl"
    assert load(capture.path, partial=False).calls["op"].tolist() == ["aten.ones.default"]
    assert (tmp_path / "t.jsonl").read_text() == "another's"
    assert len(list(tmp_path.iterdir())) == 2


def test_compiled_code_runs_compiled_until_a_step_starts(tmp_path: Path) -> None:
    capture = StepCapture(tmp_path / "t.jsonl", warmup=False)
    capture.open()
    assert stance_here() == "default"
    capture.leave_step(capture.enter_step(True, None))
    assert stance_here() == "force_eager"
    capture.close()
    assert stance_here() == "default"


def test_agent_imports_neither_torch_nor_the_trace_reader() -> None:
    code = "import sys, opgrip.capture.on_demand.agent, opgrip.capture.on_demand.autostart\n"
    code += "print({'torch', 'numpy', 'pandas', 'rich'} & sys.modules.keys())"
    assert run_python("-c", code, fresh=True).stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--signal USR1 -- a.py", "--signal is for programs that keep running: add --on-demand"),
        ("--on-demand", "--on-demand is for scripts"),
        ("--on-demand --last 9 -- a.py", "--last is for a capture of a whole program"),
        ("--on-demand --private --values full -- a.py", "cannot be combined with --values full"),
        ("--on-demand --batch-size 2 -- a.py", "--batch-size is for models"),
        ("--on-demand --signal KILL -- a.py", "KILL cannot be used to start a recording"),
        ("trigger nobody", "no process can; start one with opcapture --on-demand"),
        ("trigger PID", "it runs without an agent"),
    ],
)
def test_invalid_words_are_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_name(tmp_path)))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    (tmp_path / "a.py").write_text("print('ran')", encoding="utf-8")
    assert main(words.replace("PID", str(os.getpid())).split()) == 2
    out, errors = capsys.readouterr()
    assert (out, errors.count("\n")) == ("", 1)
    assert message in errors


NET = """
import time, torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    def forward(self, x):
        return self.inner(x).sin()
class Forever(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net
    def forward(self, x):
        while True:
            self.net(x)
            time.sleep(0.01)
net, x = Net(), torch.ones(1, 2)
print("ready", flush=True)
"""

TRAINING = "while True: net(x); time.sleep(0.01)"
FOREVER = "Forever(net.eval())(x)"
NO_MODULE = "while True: x.sin(); time.sleep(0.01)"


def trigger(folder: Path, loop: str, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "server.py").write_text(f"{NET}\n{loop}\n", encoding="utf-8")
    with running(folder, *on_demand("--", "server.py")):
        return ask(folder, "trigger", "server", "--steps", "2", "-o", "t.jsonl", *words)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "loop", "reason"),
    [
        ((), NO_MODULE, "no module was called: call opgrip.capture.step() after each step"),
        (
            (),
            FOREVER,
            "modules (Net) are called inside a module's call that began before the recording: name the class",
        ),
        (("--step-module", "Other"), TRAINING, "no module of a class Other was called, but "),
    ],
)
def test_program_without_steps_gets_the_reason(tmp_path: Path, words: tuple[str, ...], loop: str, reason: str) -> None:
    done = trigger(tmp_path, loop, "--wait", "3s", *words)
    waiting, problem = done.stderr.splitlines()[-2:]
    assert "no step has begun yet" in waiting
    assert reason in waiting
    assert "no trace was written: no step began within 3 s" in problem
    assert reason in problem
    assert done.returncode == 2


# largest ratio of the median latency after a recording to the one before: a mode that stayed on would exceed it
WORST = 5.0
SERVICE = """
import asyncio, json, sys, threading, time, torch, uvicorn, httpx
from fastapi import FastAPI
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
net = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_positions=64)).eval()
app = FastAPI()

@app.get("/tokens")
def tokens(length: int):  # not async: runs in a pool of threads
    with torch.inference_mode():
        return net(torch.arange(length)[None] % 64).logits.argmax(-1).tolist()

@app.get("/text")
def text(length: int):
    out = net.generate(torch.arange(length)[None] % 64, max_new_tokens=4, do_sample=False, pad_token_id=0)
    return out.tolist()

server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
threading.Thread(target=server.run, daemon=True).start()
while not server.started:
    time.sleep(0.01)
port = server.servers[0].sockets[0].getsockname()[1]
expected = {}
log = open("requests.txt", "w", buffering=1)

def load():
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        number = 0
        while True:
            number += 1
            route, length = ("/text", "/tokens")[number % 4 > 0], 3 + number % 5
            start = time.perf_counter()
            reply = client.get(route, params={"length": length})
            took = time.perf_counter() - start
            same = reply.status_code == 200 and expected.setdefault((route, length), reply.json()) == reply.json()
            log.write(json.dumps([time.time(), took, same]) + "\\n")

for _ in range(4):
    threading.Thread(target=load, daemon=True).start()
print("ready", flush=True)
while True:
    time.sleep(1)
"""
RANKS = """
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
torch.manual_seed(0)
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
if dist.get_rank() == 0:
    print("ready", flush=True)
number = 0
while True:
    number += 1
    optimizer.zero_grad()
    net(torch.full((3, 4), float(number))).sum().backward()
    optimizer.step()
    time.sleep(0.01)
"""


def steps_of(trace: Trace) -> int:
    return sum(str(label).startswith("opgrip step") for label in trace.labels.index)


def replays(path: Path) -> None:
    """Check that a trace replays elsewhere: its matrix products, each as eager PyTorch runs it."""
    succeed("opreplay", path, "--op", "*mm*", "--top", "2", "--budget", "0.1", "--strict", cwd=path.parent)


@pytest.mark.slow
@needs("fastapi", "uvicorn", "httpx", "transformers")
def test_service_under_load_gives_unchanged_answers(tmp_path: Path) -> None:
    (tmp_path / "service.py").write_text(SERVICE, encoding="utf-8")
    requests = tmp_path / "requests.txt"
    with running(tmp_path, *on_demand("--", "service.py")) as process:
        wait_for(lambda: requests.read_text().count("\n") > 60, process)
        done = ask(tmp_path, "trigger", "service", "--steps", "12", "-o", "service.jsonl")
        assert done.returncode == 0, done.stderr
        count = requests.read_text().count("\n")
        wait_for(lambda: requests.read_text().count("\n") > count + 60, process)
    rows = [json.loads(line) for line in requests.read_text().splitlines() if line.endswith("]")]
    assert all(same for _, _, same in rows)
    latencies = [took for _, took, _ in rows]
    assert statistics.median(latencies[-50:]) < WORST * statistics.median(latencies[10:60])
    trace = load(tmp_path / "service.jsonl", partial=False)
    assert steps_of(trace) == 12
    # each step is a whole pass, which ends in the projection to the vocabulary
    heads = trace.calls[trace.calls["module"] == "lm_head"]
    # in inference mode linear is a single call; without gradients it is made of several
    assert heads["op"].astype(str).isin(["aten.mm.default", "aten.linear.default"]).sum() == 12
    assert set(trace.calls["thread"]) == {"AnyIO worker thread"}
    replays(tmp_path / "service.jsonl")


@pytest.mark.slow
def test_one_rank_of_a_job_is_recorded(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(RANKS, encoding="utf-8")
    command = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python", *on_demand())
    with running(tmp_path, *command, "-o", "rank%r.jsonl", "--", "train.py") as process:
        wait_for(lambda: len(list((tmp_path / "opgrip").glob("*.sock"))) == 2, process)
        assert "choose one by its PID or --rank: " in ask(tmp_path, "trigger", "train").stderr
        done = ask(tmp_path, "trigger", "train", "--rank", "1", "--steps", "2")
        assert done.stdout.split() == [str(tmp_path / "rank1.jsonl")], done.stderr
        process.terminate()
        process.wait(60)
    assert steps_of(load(tmp_path / "rank1.jsonl", partial=False)) == 2
