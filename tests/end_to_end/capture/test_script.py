"""`opcapture -- script` with unchanged programs of all kinds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from programs import refusal, run_command, run_python, succeed

from opgrip.traces import load

SCRIPT = """
import sys
import torch
import beside
print(sys.argv[1:], __name__, beside.VALUE)
print("a warning", file=sys.stderr)
torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
if "--fail" in sys.argv:
    raise ValueError("planted")
sys.exit(7 if "--seven" in sys.argv else 0)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    (tmp_path / "beside.py").write_text("VALUE = 42\n", encoding="utf-8")
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text("import torch; torch.ones(3).sin()", encoding="utf-8")
    return tmp_path


def test_script_runs_as_without_opcapture(folder: Path) -> None:
    done = succeed("opcapture", "--", "train.py", "--epochs", "1", "-o", "x", cwd=folder)
    assert done.stdout == "['--epochs', '1', '-o', 'x'] __main__ 42\n"
    assert done.stderr.startswith("a warning\n")
    trace = load(folder / "train.jsonl", partial=False)
    assert trace.header["script"] == ["train.py", "--epochs", "1", "-o", "x"]
    line = SCRIPT.splitlines().index("torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()") + 1
    addmm = trace.calls[trace.calls["op"] == "aten.addmm.default"]
    assert addmm[["file", "line"]].to_numpy().tolist() == [["train.py", line]]


@pytest.mark.parametrize(("flag", "status"), [("--seven", 7), ("--fail", 1)])
def test_script_keeps_its_exit_status_and_the_trace_is_complete(folder: Path, flag: str, status: int) -> None:
    done = run_command("opcapture", "-o", "t.jsonl", "--", "train.py", flag, cwd=folder)
    assert done.returncode == status
    load(folder / "t.jsonl", partial=False)
    if status == 1:
        lines = done.stderr.splitlines()
        assert "ValueError: planted" in lines
        assert not [line for line in lines if "runpy" in line or "capture/script" in line]


def test_module_runs_by_its_name(folder: Path) -> None:
    succeed("opcapture", "-o", "t.jsonl", "--", "-m", "package", cwd=folder)
    assert load(folder / "t.jsonl", partial=False).calls["op"].tolist() == ["aten.ones.default", "aten.sin.default"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--",), "no script follows --"),
        (("--", "nowhere.py"), "nowhere.py does not exist"),
        (("--run", "train", "--", "train.py"), "--run is for models"),
    ],
)
def test_script_that_cannot_be_run_is_reported_in_one_line(
    folder: Path, arguments: tuple[str, ...], message: str
) -> None:
    error = refusal("opcapture", *arguments, cwd=folder, in_one_line=True)
    assert message in error
    assert not list(folder.glob("*.jsonl"))


def test_extension_that_the_script_loads_is_recorded(folder: Path) -> None:
    (folder / "uses.py").write_text("import cmath; cmath.phase(1j)", encoding="utf-8")
    succeed("opcapture", "--extension", "cmath", "--", "uses.py", cwd=folder)
    assert load(folder / "uses.jsonl", partial=False).calls["op"].tolist() == ["cmath:phase"]


def test_functions_of_a_ctypes_library_are_recorded(folder: Path) -> None:
    (folder / "library.py").write_text(
        """
import ctypes, ctypes.util
lib = ctypes.CDLL(ctypes.util.find_library("m"))
""",
        encoding="utf-8",
    )
    (folder / "uses.py").write_text(
        """
import ctypes
from library import lib
lib.cos.restype, lib.cos.argtypes = ctypes.c_double, [ctypes.c_double]
print(lib.cos(0.0))
""",
        encoding="utf-8",
    )
    done = run_command("opcapture", "--extension", "library", "--", "uses.py", cwd=folder)
    assert (done.returncode, done.stdout) == (0, "1.0\n"), done.stderr
    trace = load(folder / "uses.jsonl", partial=False)
    assert [(item.op, item.args, item.outputs) for item in trace.signatures] == [("library:lib.cos", (0.0,), 1.0)]


def test_script_that_changes_folder_keeps_files_there(folder: Path) -> None:
    other = folder / "other"
    other.mkdir()
    (other / "t.jsonl").write_text("precious", encoding="utf-8")
    (folder / "goes.py").write_text("import os, torch; os.chdir('other'); torch.ones(3)", encoding="utf-8")
    succeed("opcapture", "-o", "t.jsonl", "--", "goes.py", cwd=folder)
    assert (other / "t.jsonl").read_text(encoding="utf-8") == "precious"
    load(folder / "t.jsonl", partial=False)


POOL = """
from concurrent.futures import ThreadPoolExecutor

pool = ThreadPoolExecutor(2)
"""
POOLED = """
import atexit
import torch
from pools import pool

atexit.register(print, "last")
print(float(pool.submit(lambda: torch.ones(3).sum()).result()))
pool.submit(print, "still done")
"""


@pytest.mark.slow
def test_thread_pool_of_a_module_ends_with_the_script(tmp_path: Path) -> None:
    (tmp_path / "pools.py").write_text(POOL)
    (tmp_path / "pooled.py").write_text(POOLED)
    alone = run_python("pooled.py", cwd=tmp_path, fresh=True)
    watched = run_command("opcapture", "-o", "t.jsonl", "--", "pooled.py", cwd=tmp_path, fresh=True, timeout=120)
    assert (watched.returncode, watched.stdout) == (alone.returncode, alone.stdout) == (0, "3.0\nstill done\nlast\n")
    assert "aten.sum.default" in set(load(tmp_path / "t.jsonl", partial=False).calls["op"])


ENDS = {
    "a daemon": "threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()",
    "a thread": "threading.Thread(target=lambda: (time.sleep(0.2), print(torch.ones(2).cos().sum().item()))).start()",
    "a thread that fails": "threading.Thread(target=lambda: 1 / 0).start()",
    "hooks": "atexit.register(print, 'second'); atexit.register(print, 'first'); sys.exit(3)",
    "a hook that fails": "atexit.register(int, 'x')",
    "a subprocess": "print(subprocess.run([sys.executable, '-c', 'print(5)'], capture_output=True).stdout)",
    "a fork": "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])) if (pid := os.fork()) else os._exit(4)",
    "a fork that ends": "print(os.waitpid(pid, 0)[1]) if (pid := os.fork()) else sys.exit(4)",
    "a signal": "signal.signal(signal.SIGUSR1, lambda *_: print('heard')); os.kill(os.getpid(), signal.SIGUSR1)",
    "a signal that ends it": "sys.stdout.flush(); os.kill(os.getpid(), signal.SIGTERM)",
    "a word": "sys.exit('it cannot continue')",
    "no hooks": "atexit.register(print, 'never'); sys.stdout.flush(); os._exit(5)",
    "a hook that reports": "sys.excepthook = lambda kind, error, trace: print(kind, error); 1 / 0",
    "a hook that exits": "sys.excepthook = lambda kind, error, trace: sys.exit(6); 1 / 0",
    "a hook of threads": "threading.excepthook = print; sys.excepthook(ValueError, ValueError(3), None)",
    "a crash": "sys.stdout.flush(); os.abort()",
}


# lines that the fork of a process with triton may write at its end: objects that were not freed, by address.
OF_TRITON = re.compile(r"nanobind: | - (leaked|\.\.\.) |See https://nanobind\.")


@pytest.mark.parametrize("end", ENDS)
def test_program_ends_as_without_opcapture(tmp_path: Path, end: str) -> None:
    imports = "import atexit, os, signal, subprocess, sys, threading, time, torch"
    (tmp_path / "ends.py").write_text(f"{imports}\nprint(torch.ones(3).sin().shape)\n{ENDS[end]}\n", encoding="utf-8")
    alone = run_python("ends.py", cwd=tmp_path, timeout=60)
    watched = run_command("opcapture", "-o", "t.jsonl", "--", "ends.py", cwd=tmp_path, timeout=60)
    assert (watched.returncode, watched.stdout) == (alone.returncode, alone.stdout), watched.stderr
    lost = [line for line in alone.stderr.splitlines() if line not in watched.stderr and "ends.py" not in line]
    assert [line for line in lost if not OF_TRITON.match(line)] == []
    assert watched.stderr.count("run them again") <= 1


def test_program_reports_its_interrupt_to_its_excepthook(tmp_path: Path) -> None:
    hook = "import sys, torch\ntorch.ones(3)\nsys.excepthook = lambda kind, error, trace: print(kind, trace.tb_lineno)"
    (tmp_path / "ends.py").write_text(f"{hook}\nraise KeyboardInterrupt\n", encoding="utf-8")
    watched = run_command("opcapture", "-o", "t.jsonl", "--", "ends.py", cwd=tmp_path)
    assert (watched.returncode, watched.stdout) == (130, "<class 'KeyboardInterrupt'> 4\n"), watched.stderr


HELD = "held = {1}; weakref.finalize(held, print, 'gone'); threading.Timer(0.3, print, ['a thread ended']).start()"


@pytest.mark.parametrize(("end", "status"), [("", 0), ("sys.exit(3)", 3), ("1 / 0", 1)])
def test_objects_of_a_program_outlive_its_threads(tmp_path: Path, end: str, status: int) -> None:
    (tmp_path / "ends.py").write_text(f"import sys, threading, weakref\n{HELD}\n{end}\n", encoding="utf-8")
    watched = run_command("opcapture", "-o", "t.jsonl", "--", "ends.py", cwd=tmp_path)
    assert (watched.returncode, watched.stdout) == (status, "a thread ended\ngone\n"), watched.stderr
