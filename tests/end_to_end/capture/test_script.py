"""Programs recorded unchanged, by `opcapture -- script` or by a start-up file that the user does not control."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from programs import ROOT, refusal, run_command, run_python, succeed, wait_for
from services import SERVER, ask, environment, running

from opgrip.capture.on_demand.autostart import LINE
from opgrip.capture.on_demand.settings import settings_of
from opgrip.cli.command import counted
from opgrip.errors import UserError
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


@pytest.mark.slow
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


COUNT = """
import sys, time
before = set(sys.modules)
line = open(sys.argv[1]).read()
rounds = []
for _ in range(200):
    start = time.perf_counter(); exec(line); took = time.perf_counter() - start
    start = time.perf_counter(); import os as _; exec("x = 1"); rounds.append((took, time.perf_counter() - start))
print(sorted(set(sys.modules) - before), sorted(a for a, b in rounds)[100] < 20 * sorted(b for a, b in rounds)[100])
"""


@pytest.fixture
def site_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "opgrip_autostart.pth").write_text(LINE, encoding="utf-8")
    return folder


def test_startup_line_imports_nothing_and_is_fast_without_the_variable(site_folder: Path) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("OPGRIP_")}
    done = subprocess.run(
        [sys.executable, "-c", COUNT, site_folder / "opgrip_autostart.pth"],
        capture_output=True,
        text=True,
        env=env,
        check=True,
    )
    assert done.stdout.split() == ["[]", "True"]


@pytest.mark.slow
def test_autostarted_program_accepts_capture_requests(site_folder: Path, tmp_path: Path) -> None:
    program = f"import site; site.addsitedir({str(site_folder)!r})\n" + SERVER
    (tmp_path / "server.py").write_text(program, encoding="utf-8")
    env = {"OPGRIP_CAPTURE": "auto-%n.jsonl"}
    with running(tmp_path, sys.executable, "server.py", env=env) as process:
        wait_for(lambda: any((tmp_path / "opgrip").glob("*.sock")), process)
        done = ask(tmp_path, "trigger", "server", "--steps", "2")
        assert done.stdout.split() == [str(tmp_path / "auto-1.jsonl")], done.stderr
    assert len(load(tmp_path / "auto-1.jsonl", partial=False).labels) == 2


STEPS = """
import site; site.addsitedir({folder!r})
import torch
net = torch.nn.Linear(2, 2).eval()
for _ in range({steps}):
    net(torch.ones(1, 2))
print("went on")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "recorded"), [(6, 2), (2, 1), (0, 0)])
def test_autostart_records_the_first_steps_of_a_process(
    site_folder: Path, tmp_path: Path, steps: int, recorded: int
) -> None:
    (tmp_path / "short.py").write_text(STEPS.format(folder=str(site_folder), steps=steps), encoding="utf-8")
    env = environment(tmp_path, {"OPGRIP_CAPTURE": "auto.jsonl", "OPGRIP_STEPS": "2"})
    command = [sys.executable, "short.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env, check=True, timeout=120)
    assert done.stdout == "went on\n"
    if recorded:
        assert f"opgrip: {counted(recorded, 'step')}, " in done.stderr
        assert len(load(tmp_path / "auto.jsonl", partial=False).labels) == recorded
    else:
        assert "opgrip: no trace was written: no step began before it was stopped: no module was called" in done.stderr
        assert not list(tmp_path.glob("*.jsonl"))


@pytest.mark.slow
def test_invalid_autostart_variables_do_not_stop_a_program(site_folder: Path, tmp_path: Path) -> None:
    program = f"import site; site.addsitedir({str(site_folder)!r})\nimport torch; print('went on')"
    for env in ({"OPGRIP_CAPTURE": "t.txt"}, {"OPGRIP_CAPTURE": "t.jsonl", "OPGRIP_STEPS": "many"}):
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=environment(tmp_path, env),
            check=True,
        )
        assert done.stdout == "went on\n"
        assert "opgrip: this process does not accept requests to record: " in done.stderr


@pytest.mark.slow
def test_autostart_is_switched_on_and_off(tmp_path: Path) -> None:
    # in a separate environment, without the packages of this one
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    code = "import sys; from opgrip.tools.opgrip import main; sys.exit(main(sys.argv[1:]))"
    packages = next(path for path in map(Path, sys.path) if path.name == "site-packages")
    (purelib,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (purelib / "here.pth").write_text(f"import site; site.addsitedir({str(packages)!r})\n", encoding="utf-8")

    def autostart(word: str) -> str:
        command = [tmp_path / "venv" / "bin" / "python", "-c", code, "autostart", word]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert autostart("status").startswith("autostart is off: ")
    assert str(purelib / "opgrip_autostart.pth") in autostart("on")
    assert (purelib / "opgrip_autostart.pth").read_text() == LINE
    assert autostart("status").startswith(f"autostart is on: {purelib}")
    assert autostart("off").startswith("opgrip autostart: removed ")
    assert not (purelib / "opgrip_autostart.pth").exists()


def test_autostart_settings_are_read_from_variables() -> None:
    settings = settings_of({"OPGRIP_CAPTURE": "a-%p.jsonl", "OPGRIP_SECONDS": "2"})
    assert (settings.seconds, settings.steps) == (2, None)
    assert not settings.at_start
    assert settings_of({"OPGRIP_CAPTURE": "a.jsonl", "OPGRIP_STEPS": "2"}).at_start
    assert not settings_of({"OPGRIP_CAPTURE": "a.jsonl", "OPGRIP_STEPS": "2", "OPGRIP_SIGNAL": "USR1"}).at_start
    assert Path(settings.output).is_absolute()
    with pytest.raises(UserError, match="KILL cannot be used"):
        settings_of({"OPGRIP_CAPTURE": "a.jsonl", "OPGRIP_SIGNAL": "KILL"})


PROGRAMS = ROOT.parent / "shared" / "cases" / "programs"
NAMES = ("p07*", "p09*", "p13*", "p15*", "p17*", "p19*", "p25*", "p27*", "p34*", "q07*")
MODES = {
    "plain": "",
    "full": "--values full",
    "last": "--last 100",
    "private": "--private",
    "ahead": "--write-ahead",
    "opaque": "--compiled opaque",
}


@pytest.mark.slow
@pytest.mark.skipif(not PROGRAMS.is_dir(), reason="the programs are not next to this checkout")
@pytest.mark.parametrize(
    ("name", "mode"),
    # the programs of p09* start others, and take 22 s; q07* replays 700 cases
    [(name, mode) for name in NAMES for mode in MODES if name not in ("p09*", "q07*") or mode in ("plain", "full")],
)
def test_program_runs_as_without_a_capture_and_each_call_replays(tmp_path: Path, name: str, mode: str) -> None:
    (program,) = PROGRAMS.glob(f"{name}.py")
    expected = run_python(program, cwd=tmp_path)
    trace, results = tmp_path / "t.jsonl", tmp_path / "r.json"
    done = succeed("opcapture", *MODES[mode].split(), "-o", trace, "--", program, cwd=tmp_path)
    # the prints of ranks mix
    assert (sorted(done.stdout), done.returncode) == (sorted(expected.stdout), expected.returncode)
    if mode == "last":
        # nothing happened to the program that would make it write its last calls
        return
    traces = sorted(tmp_path.glob("t*.jsonl"))
    assert len(traces) == (2 if name == "p09*" else 1)
    rows = []
    for trace in traces:
        succeed("opgrip", "trace", "validate", trace)
        succeed("opreplay", trace, "--iterations", "1", "--warmup", "0", "-f", "-o", results, cwd=tmp_path)
        rows += json.loads(results.read_text())["results"]
    bad = [(row["op"], row["status"], row["error"]) for row in rows if row["status"] not in ("ok", "skipped")]
    assert all(status == "unsupported" and error for _, status, error in bad), bad
    assert not [op for op, _, error in bad if "meta" in error or "not a plain tensor" in error or "torage" in error]
