"""Exit of the commands when their readers close pipes, devices are full, or users press Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from forks import run_forked
from programs import program_path, receive_ctrl_c, run_command

from opgrip.replay.cases.selection import PointOptions

FAST = "--iterations 1 --warmup 0 --top 2"


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [f"opreplay TRACE {FAST}", "opgrip trace info TRACE", "opgrip longtail TRACE"],
)
def test_closed_reader_causes_no_error(command: str, tiny_trace: Path) -> None:
    words = command.replace("TRACE", str(tiny_trace))
    line = f"set -o pipefail; {Path(program_path('opreplay')).parent}/{words} | true"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "Error" not in done.stderr


def test_full_device_is_reported_in_one_line() -> None:
    command = [program_path("opgrip"), "trace", "info", "trace:faster_rcnn"]
    with Path("/dev/full").open("w") as full:
        done = run_forked(command, terminal=full.fileno())
    assert done.returncode == 2
    assert done.stderr == "opgrip trace info: error: the output cannot be written: no space left on device\n"


@pytest.mark.slow
def test_interrupted_replay_prints_the_command_that_resumes_it(tmp_path: Path) -> None:
    words = ["trace:faster_rcnn", "--op", "aten.*", "--budget", "1", "-o", "a file.json"]
    command = [program_path("opreplay"), *words]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=receive_ctrl_c
    )
    assert process.stderr is not None
    assert "replaying" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 130, err
    assert "cases; continue with: opreplay trace:faster_rcnn --op 'aten.*' --budget 1 -o 'a file.json' --resume" in err
    if "interrupted after 0 of" in err:
        assert out == ""


def test_more_threads_than_processors_are_reported(tiny_trace: Path) -> None:
    processors = len(os.sched_getaffinity(0))
    assert PointOptions(threads=(processors,)).notes == ()
    (note,) = PointOptions(threads=(1, processors + 1)).notes
    assert note.startswith(f"{processors + 1} threads would share ")
    done = run_command("opreplay", tiny_trace, *FAST.split(), "--threads", processors + 1)
    assert note in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "closed",
    ["<&- >&- 2>&-", ">&-", "2>&-"],
)
def test_commands_work_with_closed_streams(tmp_path: Path, closed: str) -> None:
    (tmp_path / "one.py").write_text("import torch; print(torch.ones(3).sin().shape)", encoding="utf-8")
    programs = Path(program_path("opcapture")).parent
    lines = [
        f"{programs}/opcapture -- one.py {closed}",
        f"{programs}/opreplay one.jsonl {FAST} -o one.json {closed}",
        f"{programs}/opgrip trace info one.jsonl {closed}",
    ]
    done = subprocess.run(["bash", "-ec", "\n".join(lines)], cwd=tmp_path, timeout=300, check=False)
    assert done.returncode == 0
    assert (tmp_path / "one.json").stat().st_size


@pytest.mark.slow
def test_worker_processes_never_import_modules_of_the_current_folder(tmp_path: Path, tiny_trace: Path) -> None:
    for name in ("opgrip", "json", "runpy"):
        (tmp_path / f"{name}.py").write_text("open('planted', 'w')", encoding="utf-8")
    done = run_command("opreplay", tiny_trace, *FAST.split(), "--op", "*mm*", "--device", "meta", cwd=tmp_path)
    # no case with tensors runs on the device `meta`
    assert done.returncode == 1, done.stderr
    assert not (tmp_path / "planted").exists()
