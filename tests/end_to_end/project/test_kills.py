"""Commands killed at random moments, a few times by default; they must not lose measurements.

`OPGRIP_KILLS=30 make test ARGS=tests/end_to_end/project/test_kills.py` kills each thirty times.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from programs import program_path

from opgrip.replay import Results
from opgrip.traces import load

KILLS = int(os.environ.get("OPGRIP_KILLS", "3"))
LAST_S = 2.0  # Duration of calls that a killed capture may lack: one second, and another for a busy machine.

pytestmark = pytest.mark.slow

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
