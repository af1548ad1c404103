"""Start of the commands, and their exit when readers close pipes, devices are full, or users press Ctrl-C."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from forks import run_forked
from programs import program_path, receive_ctrl_c, run_command, run_python, succeed

from opgrip.replay.cases.selection import PointOptions
from opgrip.tools.verbs import verbs

ENTRIES = {
    "opcapture": "opgrip.capture.start",
    "opreplay": "opgrip.replay.command.opreplay",
    "opgrip": "opgrip.tools.opgrip",
}
LOADED = """
import contextlib, importlib, io, json, sys
main = importlib.import_module(sys.argv[1]).main
loaded = []
for words in json.loads(sys.argv[2]):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            main(words)
        except SystemExit:
            loaded.append([words, sorted({"torch", "numpy", "pandas"} & sys.modules.keys())])
print(json.dumps(loaded))
"""


@pytest.mark.parametrize("command", ENTRIES)
def test_help_version_and_usage_errors_load_neither_torch_nor_pandas(command: str) -> None:
    lines = [["--help"], ["--version"], ["--nosuch"]]
    if command == "opgrip":
        lines += [[*name.split(), word] for name, _ in verbs.items() for word in ("--help", "--nosuch")]
    done = run_python("-c", LOADED, ENTRIES[command], json.dumps(lines), fresh=True, status=0)
    assert json.loads(done.stdout) == [[words, []] for words in lines]


@pytest.mark.parametrize("command", [[program_path(name)] for name in ENTRIES] + [[sys.executable, "-m", "opgrip"]])
def test_every_command_prints_its_version(command: list[str]) -> None:
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert done.stdout == f"opgrip {metadata.version('opgrip')}, torch {metadata.version('torch')}\n"


@pytest.mark.slow
def test_terminal_shows_that_torch_is_loading_and_then_clears_the_line() -> None:
    ours, theirs = pty.openpty()
    command = [program_path("opreplay"), "nothere.jsonl"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=theirs, stdin=subprocess.DEVNULL) as process:
        os.close(theirs)
        text = b""
        while b"\n" not in text:
            text += os.read(ours, 4096)
        process.wait()
    os.close(ours)
    line, _, rest = text.decode().partition("\r\x1b[K")
    assert line == "opreplay: loading torch ..."
    assert rest.startswith("opreplay: error: nothere.jsonl")


def test_public_names_are_functions_and_not_modules() -> None:
    import opgrip.replay.command.replay  # binds the module in its package

    assert {name: type(getattr(opgrip.replay, name)).__name__ for name in ("replay", "benchmark")} == {
        "replay": "function",
        "benchmark": "function",
    }
    assert callable(opgrip.capture.capture)
    with pytest.raises(TypeError, match=r"opgrip.replay is a package, .*from opgrip.replay import replay$"):
        opgrip.replay("step.jsonl")  # type: ignore[operator]
    with pytest.raises(TypeError, match=r"from opgrip.capture import capture$"):
        opgrip.capture(None)  # type: ignore[operator]
    assert {"Result", "Results"} <= set(dir(opgrip.replay))
    with pytest.raises(AttributeError, match="has no attribute 'nosuch'"):
        _ = opgrip.replay.nosuch  # type: ignore[attr-defined]


@pytest.mark.parametrize(("command", "rare"), [("opreplay", "--nsys-warmup"), ("opcapture", "--salt-file")])
def test_help_shows_common_options_and_help_all_shows_all(command: str, rare: str) -> None:
    shown, everything = (succeed(command, flag).stdout for flag in ("--help", "--help-all"))
    for part in ("--output", "--device", "--help-all", "examples:"):
        assert part in shown
        assert part in everything
    assert rare in everything
    assert rare not in shown
    assert sum(line.startswith("  -") for line in shown.splitlines()) <= 35


FAST = "--iterations 1 --warmup 0 --top 2"


@pytest.mark.slow
@pytest.mark.parametrize("command", [f"opreplay TRACE {FAST}", "opgrip trace info TRACE", "opgrip longtail TRACE"])
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
@pytest.mark.parametrize("closed", ["<&- >&- 2>&-", ">&-", "2>&-"])
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
