"""`opcapture -- script` with scripts that cannot start, call nothing, are interrupted, or fork."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest
from programs import program_path, receive_ctrl_c, refusal, run_command, succeed, wait_for

from opgrip.traces import load

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
def folder(tmp_path: Path) -> Path:
    texts = {
        "train.py": "import torch; torch.ones(3)",
        "broken.py": "import torch\ndef (",
        "imports.py": "import no_such_package",
        "idle.py": "print('done')",
        "forks.py": FORKS,
        "package/__init__.py": "",
        "package/broken.py": "x = (",
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
        (("-o", "t.jsonl", "--", "-m"), "no script follows --"),
        (("-o", "t.jsonl", "--", "nowhere.py"), "nowhere.py does not exist: name a script"),
        (("-o", "t.jsonl", "--", "trian.py"), "trian.py does not exist: did you mean train.py?"),
        (
            ("-o", "t.jsonl", "--", "broken.py"),
            "broken.py cannot start: SyntaxError: invalid syntax (broken.py, line 2)",
        ),
        (("--grip", "__main__:f", "--", "broken.py"), "broken.py cannot start: SyntaxError: invalid syntax"),
        (("--", "package"), "package cannot start: can't find '__main__' module in 'package'"),
        (("--", "-m", "no_such_package"), "-m no_such_package cannot start: No module named no_such_package"),
        (("--", "-m", "package"), "-m package cannot start: No module named package.__main__"),
        (("--", "-m", "package.broken"), "-m package.broken cannot start: SyntaxError: "),
    ],
)
def test_script_that_cannot_start_is_reported_in_one_line_and_leaves_no_file(
    folder: Path, words: tuple[str, ...], message: str
) -> None:
    error = refusal("opcapture", *words, cwd=folder, in_one_line=True)
    assert error.startswith(f"opcapture: error: {message}")
    assert not traces_in(folder)


def test_script_with_a_failing_import_shows_its_traceback_and_leaves_no_file(folder: Path) -> None:
    (folder / "t.jsonl").write_text("precious", encoding="utf-8")
    done = run_command("opcapture", "-f", "-o", "t.jsonl", "--", "imports.py", cwd=folder)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[:2] == ["Traceback (most recent call last):", '  File "imports.py", line 1, in <module>']
    assert "ModuleNotFoundError: No module named 'no_such_package'" in lines
    assert (folder / "t.jsonl").read_text(encoding="utf-8") == "precious"
    assert traces_in(folder) == {"t.jsonl"}


def test_script_without_operator_calls_writes_no_trace(folder: Path) -> None:
    done = run_command("opcapture", "-o", "t.jsonl", "--", "idle.py", cwd=folder)
    assert (done.returncode, done.stdout) == (0, "done\n")
    assert done.stderr == "opcapture: no operator was called: no trace was written\n"
    assert not traces_in(folder)


def test_model_without_operator_calls_is_reported_and_writes_no_trace(tmp_path: Path) -> None:
    factory = "import torch\ndef make(): return torch.nn.Identity(), torch.ones(3)"
    (tmp_path / "nets.py").write_text(factory, encoding="utf-8")
    error = refusal("opcapture", "--model", "nets.py:make", cwd=tmp_path)
    advice = "make called no operator, so there is nothing to record: check that it computes with tensors"
    assert error.splitlines()[-1] == f"opcapture: error: {advice}"
    assert not traces_in(tmp_path)


@pytest.mark.slow
def test_ctrl_c_names_the_trace_of_a_script(folder: Path) -> None:
    endless = "import time, torch\nx = torch.ones(3)\nwhile True:\n    x = x + 1\n    time.sleep(0.001)\n"
    (folder / "endless.py").write_text(endless, encoding="utf-8")
    command = [program_path("opcapture"), "--", "endless.py"]
    process = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True, preexec_fn=receive_ctrl_c)
    wait_for(lambda: any(part.stat().st_size > 2000 for part in folder.glob("endless.part*")), process)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == 130
    calls = len(load(folder / "endless.jsonl", partial=False).calls)
    first, second = (line for line in stderr.splitlines() if "the machine was busy" not in line)
    assert first.startswith(f"opcapture: {calls:,} calls of 2 signatures, ")
    assert first.endswith(" kB, to endless.jsonl (interrupted)")
    assert second == "opcapture: run them again with: opreplay endless.jsonl"


def test_files_of_forked_processes_are_named_and_replaced_with_force(folder: Path) -> None:
    command = ("opcapture", "-o", "t.jsonl.gz")
    done = succeed(*command, "--", "forks.py", cwd=folder)
    first = traces_in(folder) - {"t.jsonl.gz"}
    assert len(first) == 2
    assert f"opcapture: calls of 2 processes that it started, to {', '.join(sorted(first))}\n" in done.stderr
    (folder / "t.jsonl.gz").unlink()
    again = run_command(*command, "--", "forks.py", cwd=folder)
    assert (
        f"opcapture: removed files of an earlier run, because of --force: {', '.join(sorted(first))}\n" in again.stderr
    )
    third = run_command(*command, "--force", "--", "forks.py", cwd=folder)
    assert "of an earlier run" not in third.stderr
    remaining = traces_in(folder) - {"t.jsonl.gz"}
    assert len(remaining) == 2
    assert not remaining & first


def test_script_that_cannot_start_keeps_files_of_an_earlier_run(folder: Path) -> None:
    run_command("opcapture", "-o", "t.jsonl", "--", "forks.py", cwd=folder)
    before = traces_in(folder)
    assert len(before) == 3
    assert run_command("opcapture", "-f", "-o", "t.jsonl", "--", "broken.py", cwd=folder).returncode == 2
    assert run_command("opcapture", "-f", "-o", "t.jsonl", "--", "idle.py", cwd=folder).returncode == 0
    assert traces_in(folder) == before
