"""The commands' start, and their exit when pipes close, devices are full, users press Ctrl-C, or at kills."""

from __future__ import annotations

import json
import os
import pty
import random
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from forks import run_forked
from programs import program_path, receive_ctrl_c, run_command, run_python, succeed

from opgrip.replay import Results
from opgrip.replay.cases.selection import PointOptions
from opgrip.tools.verbs import verbs
from opgrip.traces import load

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


KILLS = int(os.environ.get("OPGRIP_KILLS", "3"))
LAST_S = 2.0  # Duration of calls that a killed capture may lack: one second, and another for a busy machine.


LOOP = """
import sys, time, torch
x = torch.ones(16)
with open(sys.argv[1], "w") as log:
    for number in range(10**9):
        x + number
        log.write(f"{number} {time.monotonic()}\\n")
        log.flush()
        time.sleep(0.001)
"""


@pytest.fixture
def randomness(request: pytest.FixtureRequest) -> random.Random:
    """Return random numbers that differ in each run; the output of a failed test names the seed."""
    seed = int(os.environ.get("OPGRIP_SEED", time.time_ns() % 10**6))
    print(f"OPGRIP_SEED={seed}")
    return random.Random(f"{seed} {request.node.name}")


def killed(command: list[Any], folder: Path, after_s: float) -> bool:
    """Run a command and kill it after some time; return True if it was still running."""
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        try:
            _, errors = process.communicate(timeout=after_s)
        except subprocess.TimeoutExpired:
            process.kill()
            return True
        assert process.returncode == 0, errors.decode()
    return False


@pytest.mark.slow
def test_killed_capture_lacks_at_most_its_last_second(tmp_path: Path, randomness: random.Random) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    for number in range(KILLS):
        folder = tmp_path / str(number)
        folder.mkdir()
        log = folder / "log"
        command = [program_path("opcapture"), "-o", "t.jsonl", "--", tmp_path / "loop.py", log]
        with subprocess.Popen(command, cwd=folder, stderr=subprocess.DEVNULL) as process:
            while not log.exists():
                assert process.poll() is None
                time.sleep(0.05)
            time.sleep(randomness.uniform(0, 3 * LAST_S))
            at = time.monotonic()
            process.kill()
        lines = [line.split() for line in log.read_text().splitlines() if line.count(" ") == 1]
        done = sum(float(when) < at - LAST_S for _, when in lines)
        parts = list(folder.glob("t*.jsonl"))
        additions = sum((load(part).calls["op"] == "aten.add.Tensor").sum() for part in parts)
        assert additions >= done, f"{len(lines)} iterations ran"


def rows_kept(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """Return the rows of each case that a replay has written to disk so far."""
    journal = folder / "r.json.journal"
    if (folder / "r.json").exists():
        frame: pd.DataFrame = Results.load(folder / "r.json").frame
        return {int(case): rows.to_dict("records") for case, rows in frame.groupby("case")}
    lines = journal.read_text().splitlines(keepends=True)[1:] if journal.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return {rows[0]["case"]: rows for rows in records}


@pytest.mark.slow
def test_replay_killed_and_resumed_repeatedly_keeps_every_row(
    tmp_path: Path, randomness: random.Random, detector_trace: Path
) -> None:
    options = ["--iterations", "2", "--warmup", "0"]
    command = [program_path("opreplay"), detector_trace, *options, "-o", "r.json", "--resume"]
    medians: dict[int, list[float]] = {}
    kills = whole_runs = 0
    while kills < KILLS:
        kills += killed(command, tmp_path, randomness.uniform(1.5, 6))
        rows = rows_kept(tmp_path)
        assert set(medians) <= set(rows), f"{len(medians)} cases had been measured"
        new_medians = {case: [row["median_us"] for row in of_case] for case, of_case in rows.items()}
        assert all(new_medians[case] == times for case, times in medians.items())
        medians = new_medians
        if (tmp_path / "r.json").exists():
            whole_runs += 1
            assert not (tmp_path / "r.json.journal").exists()
            (tmp_path / "r.json").unlink()
            medians = {}
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    frame = Results.load(tmp_path / "r.json").frame
    assert frame["case"].is_unique
    assert all(frame.set_index("case").loc[case, "median_us"] in times for case, times in medians.items())
