"""Processes that a program spawns with `multiprocessing`: each is recorded, and finds nothing changed."""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import run_command

from opgrip.traces import Trace, load

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


def children(folder: Path) -> list[Trace]:
    return [load(path, partial=False) for path in sorted(folder.glob("t.pid*.jsonl"))]


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
    traces = children(tmp_path)
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
