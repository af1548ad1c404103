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


SHORT = """
import atexit, sys, torch
SLOW = {"numba", "pandas", "pyarrow", "scipy", "sympy", "torch._dynamo", "torch._inductor", "transformers"}
atexit.register(lambda: print(sorted(SLOW & {*sys.modules})))
for _ in range(int(sys.argv[1])):
    torch.ones(2)
"""


def test_recording_of_a_short_script_imports_no_slow_modules(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(SHORT, encoding="utf-8")
    alone = run_python("a.py", 50, cwd=tmp_path, fresh=True)
    done = [run_command("opcapture", "-f", "--", "a.py", count, cwd=tmp_path, fresh=True) for count in (50, 400)]
    assert done[0].stdout == alone.stdout
    # tests that recognize calls pay for the import of torch's compiler
    assert "torch._dynamo" in done[1].stdout


def test_module_runs_by_its_name(folder: Path) -> None:
    succeed("opcapture", "-o", "t.jsonl", "--", "-m", "package", cwd=folder)
    assert load(folder / "t.jsonl", partial=False).calls["op"].tolist() == ["aten.ones.default", "aten.sin.default"]


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
    "hooks": "atexit.register(print, 'second'); atexit.register(print, 'first'); sys.exit(3)",
    "a hook that fails": "atexit.register(int, 'x')",
    "a fork": "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])) if (pid := os.fork()) else os._exit(4)",
    "a fork that ends": "print(os.waitpid(pid, 0)[1]) if (pid := os.fork()) else sys.exit(4)",
    "a signal that ends it": "sys.stdout.flush(); os.kill(os.getpid(), signal.SIGTERM)",
    "a word": "sys.exit('it cannot continue')",
    "no hooks": "atexit.register(print, 'never'); sys.stdout.flush(); os._exit(5)",
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


@pytest.mark.parametrize(("end", "status"), [("", 0), ("1 / 0", 1)])
def test_objects_of_a_program_outlive_its_threads(tmp_path: Path, end: str, status: int) -> None:
    (tmp_path / "ends.py").write_text(f"import sys, threading, weakref\n{HELD}\n{end}\n", encoding="utf-8")
    watched = run_command("opcapture", "-o", "t.jsonl", "--", "ends.py", cwd=tmp_path)
    assert (watched.returncode, watched.stdout) == (status, "a thread ended\ngone\n"), watched.stderr


FORKS = """
import os, torch
for _ in range(2):
    child = os.fork()
    if not child:
        torch.ones(3).sin()
        break
    os.waitpid(child, 0)
else:
    torch.ones(3).cos()
"""


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    texts = {
        "train.py": "import torch; torch.ones(3)",
        "broken.py": "import torch\ndef (",
        "imports.py": "import no_such_package",
        "idle.py": "print('done')",
        "forks.py": FORKS,
        "package/__init__.py": "",
    }
    (tmp_path / "package").mkdir()
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def traces_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if ".jsonl" in path.name}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--",), "no script follows --: name a script, or -m and a module"),
        (("-o", "t.jsonl", "--", "trian.py"), "trian.py does not exist: did you mean train.py?"),
        (
            ("-o", "t.jsonl", "--", "broken.py"),
            "broken.py cannot start: SyntaxError: invalid syntax (broken.py, line 2)",
        ),
        (("--run", "train", "--", "train.py"), "--run is for models"),
        (("--", "package"), "package cannot start: can't find '__main__' module in 'package'"),
        (("--", "-m", "no_such_package"), "-m no_such_package cannot start: No module named no_such_package"),
    ],
)
def test_script_that_cannot_start_is_reported_in_one_line_and_leaves_no_file(
    scripts: Path, words: tuple[str, ...], message: str
) -> None:
    error = refusal("opcapture", *words, cwd=scripts, in_one_line=True)
    assert error.startswith(f"opcapture: error: {message}")
    assert not traces_in(scripts)


def test_script_with_a_failing_import_shows_its_traceback_and_leaves_no_file(scripts: Path) -> None:
    (scripts / "t.jsonl").write_text("precious", encoding="utf-8")
    done = run_command("opcapture", "-f", "-o", "t.jsonl", "--", "imports.py", cwd=scripts)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[:2] == ["Traceback (most recent call last):", '  File "imports.py", line 1, in <module>']
    assert "ModuleNotFoundError: No module named 'no_such_package'" in lines
    assert (scripts / "t.jsonl").read_text(encoding="utf-8") == "precious"
    assert traces_in(scripts) == {"t.jsonl"}


def test_script_without_operator_calls_writes_no_trace(scripts: Path) -> None:
    done = run_command("opcapture", "-o", "t.jsonl", "--", "idle.py", cwd=scripts)
    assert (done.returncode, done.stdout) == (0, "done\n")
    assert done.stderr == "opcapture: no operator was called: no trace was written\n"
    assert not traces_in(scripts)


def test_files_of_forked_processes_are_named_and_replaced_with_force(scripts: Path) -> None:
    command = ("opcapture", "-o", "t.jsonl.gz")
    done = succeed(*command, "--", "forks.py", cwd=scripts)
    first = traces_in(scripts) - {"t.jsonl.gz"}
    assert len(first) == 2
    assert f"opcapture: calls of 2 processes that the program started, to {', '.join(sorted(first))}\n" in done.stderr
    (scripts / "t.jsonl.gz").unlink()
    again = run_command(*command, "--", "forks.py", cwd=scripts)
    assert (
        f"opcapture: removed files of an earlier run, because of --force: {', '.join(sorted(first))}\n" in again.stderr
    )
    third = run_command(*command, "--force", "--", "forks.py", cwd=scripts)
    assert "of an earlier run" not in third.stderr
    remaining = traces_in(scripts) - {"t.jsonl.gz"}
    assert len(remaining) == 2
    assert not remaining & first
