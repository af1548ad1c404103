"""Programs with several threads and processes, which fork, spawn, are launched as ranks, crash or hang."""

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from programs import run_command, run_python, succeed, wait_for
from services import environment
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from opgrip.capture import Capture
from opgrip.traces import Trace, load
from opgrip.traces.analysis.validation import validate
from opgrip.traces.schema.arguments import GroupSpec, Opaque, ReductionSpec, leaves

NO_RANK = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}


def run_program(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return run_python("-c", text, cwd=folder, env=NO_RANK)


def test_program_threads_are_recorded_under_their_names(tmp_path: Path) -> None:
    x = torch.ones(3)
    with Capture(tmp_path / "t.jsonl"):
        thread = threading.Thread(target=x.sin, name="worker")
        thread.start()
        thread.join()
        with ThreadPoolExecutor(2, thread_name_prefix="pool") as pool:
            list(pool.map(lambda _: x.cos(), range(20)))
        x.tan()
    trace = load(tmp_path / "t.jsonl", partial=False)
    threads = trace.calls.groupby("op", observed=True)["thread"].agg(lambda column: sorted(set(column)))
    assert threads["aten.sin.default"] == ["worker"]
    assert threads["aten.tan.default"] == ["MainThread"]
    assert set(threads["aten.cos.default"]) <= {"pool_0", "pool_1"}
    assert (trace.calls["op"] == "aten.cos.default").sum() == 20


def test_concurrent_threads_lose_no_call(tmp_path: Path) -> None:
    x = torch.ones(3)

    def work() -> None:
        for _ in range(300):
            (x + 1).sum()

    with Capture(tmp_path / "t.jsonl") as watched:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert (watched.calls, watched.dropped) == (4 * 600, 0)
    load(tmp_path / "t.jsonl", partial=False)


def test_forked_process_writes_a_separate_trace(tmp_path: Path) -> None:
    done = run_program(
        """
import os, torch
from opgrip.capture import Capture
x = torch.ones(3)
with Capture("t.jsonl"):
    x.sin()
    child = os.fork()
    x.cos()
    if child:
        os.waitpid(child, 0)
        x.tan()
""",
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    (own,) = tmp_path.glob("t.pid*.jsonl")
    assert load(tmp_path / "t.jsonl", partial=False).calls["op"].tolist() == [
        *("aten.sin.default", "aten.cos.default", "aten.tan.default"),
    ]
    trace = load(own, partial=False)
    assert trace.calls["op"].tolist() == ["aten.cos.default"]
    assert trace.header["parent_pid"] == load(tmp_path / "t.jsonl").header["pid"]


@pytest.mark.slow
def test_dataloader_workers_are_recorded_and_merged(tmp_path: Path) -> None:
    done = run_program(
        """
import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils.data import DataLoader, Dataset
from opgrip.capture import Capture

class Squares(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return torch.full((3,), float(index)).square()

with Capture("t.jsonl"):
    total = sum(batch.sum() for batch in DataLoader(Squares(), batch_size=2, num_workers=2))
assert total == 3 * 140
""",
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    workers = sorted(tmp_path.glob("t.pid*.jsonl"))
    assert len(workers) == 2
    merged = tmp_path / "all.jsonl"
    succeed("opgrip", "trace", "merge", tmp_path / "t.jsonl", *workers, "-o", merged)
    whole = load(merged, partial=False)
    parts = [load(path, partial=False) for path in (tmp_path / "t.jsonl", *workers)]
    assert len(whole.calls) == sum(len(part.calls) for part in parts)
    squares = whole.calls[whole.calls["op"] == "aten.pow.Tensor_Scalar"]
    assert squares.groupby("process", observed=True).size().to_dict() == {1: 4, 2: 4}
    # records that the workers share are stored once
    assert len(whole.signatures) < sum(len(part.signatures) for part in parts)
    assert len(set(whole.storages)) == sum(len(set(part.storages)) for part in parts)


@pytest.mark.slow
def test_ranks_write_one_file_each_with_their_collectives(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        """
import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
import torch.distributed as dist
dist.init_process_group("gloo")
x = torch.full((4,), float(dist.get_rank()))
dist.all_reduce(x, op=dist.ReduceOp.MAX)
dist.broadcast(x, 1)
pair = dist.new_group([1, 0])
dist.all_gather([torch.empty(4), torch.empty(4)], x, group=pair)
assert x.tolist() == [1.0] * 4
dist.destroy_process_group()
""",
        encoding="utf-8",
    )
    options = ("--nproc-per-node", "2", "--master-port", "29617", "--no-python")
    succeed(
        "torchrun", *options, Path(sys.executable).parent / "opcapture", "-o", "t.jsonl", "--", "train.py", cwd=tmp_path
    )
    for rank in (0, 1):
        trace = load(tmp_path / f"t.rank{rank}.jsonl", partial=False)
        assert (trace.header["rank"], trace.header["world_size"]) == (rank, 2)
        collectives = {item.op: item for item in trace.signatures if item.op.startswith("c10d.")}
        reduce = list(leaves(collectives["c10d.allreduce_.default"].args))
        (group,) = (leaf for leaf in reduce if isinstance(leaf, GroupSpec))
        assert (group.backend, group.ranks, group.rank) == ("gloo", (0, 1), rank)
        # torch 2.6 does not show the reduction
        assert (
            ReductionSpec("MAX") if hasattr(torch.classes.c10d.ReduceOp(), "op") else Opaque("c10d.ReduceOp")
        ) in reduce
        assert "c10d.broadcast_.default" in collectives
        assert "c10d.allgather_.default" in collectives
    merged = tmp_path / "all.jsonl"
    assert run_command("opgrip", "trace", "merge", *tmp_path.glob("t.rank*"), "-o", merged).returncode == 0
    assert len(load(merged, partial=False).header["processes"]) == 2


def partial_file(folder: Path) -> Path:
    (path,) = folder.glob("t.part*")
    return path


@pytest.mark.slow
def test_call_that_kills_the_program_is_the_last_unfinished_call(tmp_path: Path) -> None:
    done = run_program(
        """
import ctypes, os, torch
from opgrip.capture import Capture
with Capture("t.jsonl", extensions=["posix"], write_ahead=True):
    torch.ones(3).sin()
    os.abort if False else __import__("posix").kill(os.getpid(), 11)
""",
        tmp_path,
    )
    assert done.returncode == -signal.SIGSEGV
    trace = load(partial_file(tmp_path))
    (last,) = trace.unfinished
    assert last.opened is not None
    assert (last.opened.op, last.opened.args[1]) == ("posix:kill", 11)
    assert trace.calls["op"].tolist()[:2] == ["aten.ones.default", "aten.sin.default"]
    done = run_command("opgrip", "trace", "info", "--partial", partial_file(tmp_path))
    assert "unfinished  posix:kill(" in done.stdout


@pytest.mark.slow
def test_hanging_call_is_in_the_trace_when_the_program_is_killed(tmp_path: Path) -> None:
    program = """
import time, torch
from opgrip.capture import Capture
with Capture("t.jsonl", extensions=["time"]):
    torch.ones(3)
    time.sleep(100)
"""
    with subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path, env=NO_RANK) as process:
        wait_for(lambda: any(b'"entered"' in part.read_bytes() for part in tmp_path.glob("t.part*")), process)
        process.kill()
    trace = load(partial_file(tmp_path))
    assert [entered.opened.op for entered in trace.unfinished if entered.opened] == ["time:sleep"]


def test_overlapping_captures_restore_all_patched_functions(tmp_path: Path) -> None:
    import math

    before = (torch.nn.Module.__call__, threading.Thread.start, math.hypot)
    stance = torch._dynamo.eval_frame._stance.stance
    one, two = (Capture(tmp_path / f"{number}.jsonl", extensions=["math"]) for number in (1, 2))
    mode = [one.__enter__(), two.__enter__()]
    math.hypot(3.0, 4.0)
    for watched in mode:
        watched.close()
    assert (torch.nn.Module.__call__, threading.Thread.start, math.hypot) == before
    assert torch._dynamo.eval_frame._stance.stance == stance
    for number in (1, 2):
        assert "math:hypot" in load(tmp_path / f"{number}.jsonl", partial=False).calls["op"].tolist()


def test_no_dispatch_mode_remains_after_a_thread_outlived_the_capture(tmp_path: Path) -> None:
    begun, go = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        go.wait()

    with Capture(tmp_path / "t.jsonl"):
        thread = threading.Thread(target=work)
        thread.start()
        begun.wait()
        assert is_in_torch_dispatch_mode()
    go.set()
    thread.join()
    # otherwise torch.compile would run all following code eagerly
    assert not is_in_torch_dispatch_mode()


CLOSES_DESCRIPTORS = """
import gc, os, torch
from opgrip.capture import Capture
from opgrip.capture.on_demand.agent import start_agent
from opgrip.capture.on_demand.settings import AgentSettings
from opgrip.capture.on_demand.verbs import processes

def ask(): return [item.name for item in processes() if item.pid == os.getpid()]

agent = start_agent(AgentSettings("here"))
captures = [Capture("a.jsonl"), Capture("b.jsonl.gz", values="full"), Capture("c.jsonl", last=5)]
for capture in captures:
    with capture:
        x = torch.ones(3).sin()
        capture._flusher.write_now()
        os.closerange(3, 256)
        files = [os.open(f"{os.path.basename(capture.path)}.{number}", os.O_RDWR | os.O_CREAT) for number in range(20)]
        capture._flusher.write_now()
        x.cos().add(x)
        if capture.keeps_last:
            capture.dump()
    assert capture.failure is None, capture.failure
    gc.collect()
    assert [os.write(file, b"own") + len(os.pread(file, 99, 0)) for file in files] == [6] * 20
assert ask() == ["here"] == ask()
assert [os.pread(file, 99, 0) for file in files] == [b"own"] * 20
"""


@pytest.mark.slow
def test_capture_leaves_files_alone_that_got_its_closed_descriptors(tmp_path: Path) -> None:
    done = run_python("-c", CLOSES_DESCRIPTORS, cwd=tmp_path, env=environment(tmp_path), fresh=True)
    assert (done.returncode, done.stderr) == (0, "")
    for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl"):
        assert {"aten.sin.default", "aten.cos.default"} <= set(load(tmp_path / name, partial=False).calls["op"])


REPLACES_FUNCTIONS = """
import builtins, io, json, logging, os, queue, sys, threading, time
from contextlib import ExitStack
from types import BuiltinFunctionType, FunctionType, ModuleType
from unittest import mock
import torch
from opgrip.capture import Capture

def is_callable(value): return isinstance(value, (BuiltinFunctionType, FunctionType)) or isinstance(value, type)

def replaced(fake):
    stack = ExitStack()
    # as freezegun does
    clocks = {id(getattr(time, name)) for name in ("monotonic", "perf_counter", "perf_counter_ns", "time_ns", "sleep")}
    for module in [module for module in sys.modules.values() if isinstance(module, ModuleType)]:
        for name, value in list(vars(module).items()):
            if id(value) in clocks or (module in REPLACED and name[0] != "_" and is_callable(value)):
                stack.enter_context(mock.patch.object(module, name, fake))
    return stack

REPLACED = json, json.encoder, os, os.path, time, threading, logging, io
for number, options in enumerate([{}, {"values": "full"}, {"write_ahead": True}]):
    with Capture(f"{number}.jsonl", **options) as capture:
        x = torch.ones(3).sin()
        fake = mock.Mock(side_effect=OSError("replaced"))
        with replaced(fake), mock.patch.object(builtins, "open", fake), mock.patch.object(queue, "SimpleQueue", fake):
            x.cos().reshape(1, 3).matmul(torch.ones(3, 3))
            capture._flusher.write_now()
        x.tan()
"""


@pytest.mark.slow
def test_functions_of_python_that_a_program_replaces_do_not_change_the_trace(tmp_path: Path) -> None:
    done = run_program(REPLACES_FUNCTIONS, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    for path in [tmp_path / f"{number}.jsonl" for number in range(3)]:
        calls = load(path, partial=False).calls
        assert list(calls["op"].str.split(".").str[1]) == ["ones", "sin", "cos", "view", "ones", "mm", "tan"]
        assert calls["start_ns"].is_monotonic_increasing
        assert (calls["duration_ns"] > 0).all()
        assert validate(path).findings == []


PROGRAM = """
import multiprocessing, os, sys, torch

def grandchild():
    torch.ones(3).tan()

def child(number, queue, environment):
    x = torch.ones(3)
    for _ in range(number):
        x.sin()
    methods = {{"spawn", "fork"}} if number == 1 else ()
    for method in methods:
        process = multiprocessing.get_context(method).Process(target=grandchild)
        process.start()
        process.join()
    queue.put((number, dict(os.environ) == environment, sys.argv[1:], sys.orig_argv[-1]))
    sys.exit(number)

if __name__ == "__main__":
    context = multiprocessing.get_context({method!r})
    queue = context.Queue()
    processes = [context.Process(target=child, args=(number, queue, dict(os.environ))) for number in (1, 2)]
    for process in processes:
        process.start()
    torch.ones(3).cos()
    print(*sorted(queue.get(timeout=120) for _ in processes))
    for process in processes:
        process.join()
    print([process.exitcode for process in processes])
"""
OUTPUT = "(1, True, ['--x'], '--multiprocessing-fork') (2, True, ['--x'], '--multiprocessing-fork')\n[1, 2]\n"


def ops(trace: Trace) -> list[str]:
    return [op for op in trace.calls["op"].astype(str) if op != "aten.ones.default"]


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--private",)])
def test_spawned_processes_are_recorded_and_run_unchanged(tmp_path: Path, options: tuple[str, ...]) -> None:
    (tmp_path / "train.py").write_text(PROGRAM.format(method="spawn"), encoding="utf-8")
    done = run_command("opcapture", *options, "-o", "t.jsonl", "--", "train.py", "--x", cwd=tmp_path, fresh=True)
    assert (done.returncode, done.stdout) == (0, OUTPUT), done.stderr
    assert "Warning" not in done.stderr
    assert "opcapture: calls of 4 processes that the program started, to t.pid" in done.stderr
    traces = [load(path, partial=False) for path in sorted(tmp_path.glob("t.pid*.jsonl"))]
    parent = load(tmp_path / "t.jsonl", partial=False)
    assert ops(parent) == ["aten.cos.default"]
    sines = sorted(ops(trace) for trace in traces)
    assert sines == [["aten.sin.default"], ["aten.sin.default"] * 2, *[["aten.tan.default"]] * 2]
    first = next(trace for trace in traces if ops(trace) == ["aten.sin.default"])
    if "--private" in options:
        # names are hashed alike in all processes
        other = next(trace for trace in traces if len(ops(trace)) == 2)
        assert {*first.calls["function"]} == {*other.calls["function"]}
        assert "child" not in {*first.calls["function"]}
    else:
        parents = [trace.header["parent_pid"] for trace in traces if "aten.tan.default" in ops(trace)]
        assert parents == [first.header["pid"]] * 2


POOL = """
import multiprocessing, torch

def square(size):
    return float(torch.full((size, size), 2.0).matmul(torch.eye(size)).sum())

if __name__ == "__main__":
    with multiprocessing.get_context({method!r}).Pool(1) as pool:
        print(pool.map(square, [2, 3], chunksize=1))
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_calls_of_pool_workers_are_written_before_the_pool_kills_them(tmp_path: Path, method: str) -> None:
    (tmp_path / "train.py").write_text(POOL.format(method=method), encoding="utf-8")
    done = run_command("opcapture", "-o", "t.jsonl", "--", "train.py", cwd=tmp_path, fresh=True)
    assert (done.returncode, done.stdout) == (0, "[8.0, 18.0]\n"), done.stderr
    # a slow pool may end before it is killed
    (trace,) = tmp_path.glob("t.*pid*.jsonl")
    was = "was killed" if ".part" in trace.name else "it started"
    assert f"calls of a process that {was}, to {trace.name}" in done.stderr
    assert [op for op in ops(load(trace)) if op == "aten.mm.default"] == ["aten.mm.default"] * 2
