"""Cases distributed over two devices, with one process per device, and reading the output of several processes."""

from __future__ import annotations

import gzip
import json
import subprocess
from collections.abc import Iterator
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import program_path, wait_for
from simulation import on_simulator

from opgrip.capture import Capture
from opgrip.errors import UserError
from opgrip.replay import Results, replay
from opgrip.replay.command.opreplay import main as opreplay
from opgrip.replay.command.replay_options import request_with
from opgrip.replay.run.scheduling import PARTS, DealtWindows
from opgrip.replay.run.workload import Workload, load_workload

BOTH = ("--device", "sim:0,sim:1")
FEW = ("--iterations", "2", "--warmup", "0", "--cache", "warm", "--clock-warmup", "0")


def capture_calls(path: Path, count: int = 7) -> Path:
    """Capture `count` cases of sin on the CPU, and a last one of cos."""
    with Capture(path):
        for size in range(1, count + 1):
            torch.ones(size).sin()
        torch.ones(2).cos()
    return path


def replay_on_both(trace: Path, *options: str) -> Any:
    """Return the results of a quick replay on both devices."""
    output = trace.with_suffix(".rows.json")
    # create contexts, so that no further process starts to query the devices
    for device in ("sim:0", "sim:1"):
        torch.ones(1, device=device)
    assert opreplay([str(trace), *FEW, *BOTH, "--op", "aten.[sc][io]*", "-o", str(output), *options]) == 0
    return Results.load(output).frame


@on_simulator(SIM_FAIL="aten::cos=device-side assert triggered", SIM_DURATIONS="aten::sin=50000")
def test_devices_share_the_cases_and_a_failing_case_costs_its_row(tmp_path: Path) -> None:
    rows = replay_on_both(capture_calls(tmp_path / "t.jsonl"))
    assert len(rows) == 8
    bad = rows[~rows["status"].isin(["ok", "contended"])]
    assert bad["op"].tolist() == ["aten.cos.default"]
    assert bad["error"].str.contains("device-side assert").all()
    assert set(rows["device"]) == {"sim:0", "sim:1"}


@on_simulator(SIM_DURATIONS="aten::sin=100000")
def test_killed_replay_on_two_devices_resumes(tmp_path: Path) -> None:
    trace, output = capture_calls(tmp_path / "t.jsonl"), tmp_path / "t.rows.json"
    journal = output.with_name(f"{output.name}.journal")
    command = [program_path("opreplay"), trace, *FEW, *BOTH, "--op", "aten.[sc][io]*", "-o", output]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        wait_for(lambda: journal.exists() and len(journal.read_text().splitlines()) > 2, process)
        process.kill()
    kept = [row for line in journal.read_text().splitlines()[1:] for row in json.loads(line)]
    assert 2 <= len(kept) < 8
    rows = replay_on_both(trace, "--resume")
    assert rows["case"].is_unique
    assert len(rows) == 8
    by_case = rows.set_index("case")
    assert all(by_case.loc[row["case"], "median_us"] == row["median_us"] for row in kept)
    assert not journal.exists()


@on_simulator()
def test_rows_of_a_case_run_on_one_device_and_the_timeline_has_both(tmp_path: Path) -> None:
    rows = replay_on_both(capture_calls(tmp_path / "t.jsonl", 3), "--mode", "eager,jit", "--profile")
    assert len(rows) == 8
    assert set(rows["status"]) == {"ok"}
    assert (rows.groupby("case")["device"].nunique() == 1).all()
    with gzip.open(tmp_path / "t.rows.timeline.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    calls = [event for event in events if event.get("cat") == "user_annotation"]
    assert len({event["pid"] for event in calls}) == 2


@on_simulator(SIM_NAMES="Small;Large")
def test_unequal_devices_are_refused(tmp_path: Path) -> None:
    trace = capture_calls(tmp_path / "t.jsonl", 1)
    done = subprocess.run([program_path("opreplay"), trace, *BOTH], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == (
        "opreplay: error: sim:0 is Small (1.1 GB), and sim:1 is Large (1.1 GB): "
        "name devices of one kind with --device\n"
    )


@on_simulator()
def test_options_for_one_device_are_refused_with_two(tmp_path: Path) -> None:
    trace = capture_calls(tmp_path / "t.jsonl", 1)
    for option, problem in [
        ("--sequence", "--sequence runs on one device"),
        ("--nsys", "nsys profiles one device"),
        ("--ncu", "ncu profiles one device"),
    ]:
        with redirect_stderr(StringIO()) as errors:
            assert opreplay([str(trace), *BOTH, option]) == 2
        assert errors.getvalue() == f"opreplay: error: {problem}: name one with --device\n"


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("spread") / "t.jsonl"
    with Capture(path):
        for size in range(1, 22):
            torch.ones(size).sin()
    return path


def loaded_on(trace: Path, device: str) -> Workload:
    return load_workload(request_with(trace, device=device, op="aten.sin*", cache="warm"))


def numbers(cases: Iterator[list[Any]]) -> list[list[int]]:
    return [[case.number for case in window] for window in cases]


def test_devices_start_with_equal_parts_and_a_finished_one_takes_more(trace: Path) -> None:
    loaded = loaded_on(trace, "cuda,cuda:1")
    windows = DealtWindows(loaded, done=())
    dealt = {device: len(windows.dealt_to(device)) for device in ("cuda:0", "cuda:1")}
    assert dealt == {"cuda:0": 12, "cuda:1": 9}
    slow, quick = windows.take("cuda:0"), windows.take("cuda:1")
    first = numbers(iter([next(slow)]))
    others = numbers(quick)
    assert len(others) > PARTS - 1
    assert numbers(slow) == []
    assert sorted(number for window in first + others for number in window) == sorted(
        case.number for case in loaded.cases
    )


@pytest.mark.parametrize("devices", ["cpu,cpu", "cpu,meta"])
def test_cases_are_spread_only_over_accelerators(trace: Path, devices: str) -> None:
    with pytest.raises(UserError, match="several devices must be different accelerators, got cpu, "):
        replay(trace, device=devices)
