"""Capture and replay small programs for the steps."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gpu.step import NotHereError, Place, expect
from opgrip.capture import Capture
from opgrip.replay import replay
from opgrip.replay.results.results import CONTENDED, OK, RAN, Result

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ROOT / "traces/faster_rcnn.jsonl"
START = "import sys; from opgrip.{module} import main; sys.exit(main())"
COMMAND_MODULES = {"opcapture": "capture.start", "opreplay": "replay.command.opreplay"}
QUICK = {"budget": 0.1, "timeout": 60}  # options of replays whose times do not matter


def run_command(name: str, *words: object) -> subprocess.CompletedProcess[str]:
    """Run one of the project's commands, as a user does."""
    command = [sys.executable, "-c", START.format(module=COMMAND_MODULES[name]), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr)
    return done


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    """Return the last line of a command's output."""
    return (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]


def capture_calls(place: Place, *calls: Callable[[], object], name: str = "calls", repeats: int = 3) -> Path:
    """Record `repeats` runs of some calls; return the path of the trace, `name` in the folder of `place`."""
    trace = place.folder / f"{name}.jsonl"
    for call in calls:
        call()
    with Capture(trace) as capture:
        for _ in range(repeats):
            for call in calls:
                call()
    expect(capture.dropped == 0, f"a capture dropped {capture.dropped} calls")
    return trace


def capture_layers(place: Place) -> Path:
    """Return the path of a new trace, in the folder of `place`, of calls of several kinds on its device."""
    torch.manual_seed(0)
    device = place.device
    images, kernel = torch.randn(2, 16, 64, 64, device=device), torch.randn(32, 16, 3, 3, device=device)
    left, right = torch.randn(256, 512, device=device), torch.randn(512, 128, device=device)
    return capture_calls(
        place,
        lambda: torch.conv2d(images, kernel, padding=1),
        lambda: torch.mm(left, right),
        lambda: torch.softmax(left, 1),
        lambda: torch.relu(left),
        lambda: left.sum(1),
        lambda: left + 1,
        name="layers",
    )


def replay_rows(place: Place, trace: Path, **options: Any) -> list[Result]:
    """Return the rows of a replay of `trace` on the device of `place`; `options` are further arguments of `replay`."""
    rows = list(replay(trace, **({"device": place.device} | QUICK | options)).rows)
    for row in rows:
        print(row.op, row.shapes, row.mode, row.status, row.median_us, row.error)
    expect(rows, "a replay gave no rows")
    return rows


def expect_ok(rows: list[Result]) -> None:
    """Raise `WrongError` if a row did not run or is wrong; a contended row is right, but without a time."""
    for row in rows:
        expect(row.status in RAN, f"{row.op} as {row.mode} is {row.status}: {row.error}")


def row_of(rows: list[Result], operator: str, mode: str = "eager") -> Result:
    """Return the first row of an operator in a mode of replay; raise `WrongError` if there is none."""
    matching = [row for row in rows if row.op == operator and row.mode == mode]
    expect(matching, f"the results have no row of {operator} as {mode}")
    return matching[0]


def median_us(row: Result) -> float:
    """Return the time of a row in us; raise `NotHereError` if other processes disturbed all its runs."""
    if row.status == CONTENDED:
        raise NotHereError(f"other processes used the cores in all runs of {row.op}")
    expect(row.status == OK and row.median_us is not None, f"{row.op} as {row.mode} is {row.status}: {row.error}")
    assert row.median_us is not None, "it is expected above"
    return row.median_us
