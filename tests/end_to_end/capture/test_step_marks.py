"""Steps that a program reports or that its optimizer shows, and their use in selecting a part of a trace."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from programs import run_command, succeed
from torch import nn

from opgrip.capture import Capture, Schedule
from opgrip.errors import UserError
from opgrip.traces import Trace, load, read
from opgrip.traces.analysis.trim import TracePart, trim
from opgrip.traces.analysis.validation import validate
from opgrip.traces.table.step_starts import find_step_starts


def ops_of(trace: Trace) -> list[str]:
    return [name.split(".")[1] for name in trace.calls["op"].astype(str)]


def steps_of(path: Path) -> list[list[str]]:
    """Return the operators of each step, after checking that both ways to select a step agree."""
    whole = load(path)
    assert whole.end is not None
    steps = []
    starts = find_step_starts(lambda: read(path))
    assert starts is not None
    for number in range(len(starts.begins[None])):
        part = load(path, steps=number)
        trim(path, path.with_name("part.jsonl"), TracePart(steps=(number, number + 1)), force=True)
        assert validate(path.with_name("part.jsonl")).findings == []
        trimmed = load(path.with_name("part.jsonl"))
        assert ops_of(trimmed) == ops_of(part)
        assert trimmed.end is not None
        assert len(trimmed.end.step_starts_ns) == 1
        steps.append(ops_of(part))
    return steps


def run(step: int) -> None:
    x = torch.ones(3)
    # no call occurs exactly once per step
    for _ in range(step + 1):
        x.sin()


@pytest.mark.parametrize(
    ("schedule", "recorded"),
    [
        (Schedule(active=2, wait=1, skip=1, warmup=1, repeat=1), [3, 4]),
        (Schedule(active=1, wait=2), [2, 5]),
        (Schedule(), [0, 1, 2, 3, 4, 5]),
    ],
    ids=["warm-up", "waiting", "always"],
)
def test_steps_of_a_schedule_are_recorded(tmp_path: Path, schedule: Schedule, recorded: list[int]) -> None:
    with Capture(tmp_path / "t.jsonl", schedule=schedule) as capture:
        for step in range(6):
            run(step)
            capture.step()
    assert steps_of(tmp_path / "t.jsonl") == [["ones", *["sin"] * (step + 1)] for step in recorded]


def test_optimizer_steps_are_recorded(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    first, second = (torch.optim.SGD(model.parameters(), foreach=False) for _ in range(2))
    with Capture(tmp_path / "t.jsonl"):
        for step in range(3):
            run(step)
            model.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            second.step() if step == 1 else first.step()
    steps = steps_of(tmp_path / "t.jsonl")
    assert [step.count("sin") for step in steps] == [1, 5]
    assert [step.count("add_") for step in steps] == [2, 4]


def test_selecting_steps_of_a_program_without_steps_is_refused(tmp_path: Path) -> None:
    with Capture(tmp_path / "t.jsonl"):
        run(1)
    with pytest.raises(UserError, match="does not record how many steps it has"):
        load(tmp_path / "t.jsonl", steps=0)
    with pytest.raises(UserError, match="does not record how many steps it has"):
        trim(tmp_path / "t.jsonl", tmp_path / "part.jsonl", TracePart(steps=(0, 1)))


def test_script_trace_is_trimmed_by_optimizer_steps(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import torch\nw = torch.ones(3, requires_grad=True)\noptimizer = torch.optim.Adam([w])\n"
        "for step in range(4):\n    w.sin().sum().backward()\n    optimizer.step()\n"
    )
    succeed("opcapture", "-o", "t.jsonl", "--", "train.py", cwd=tmp_path)
    succeed("opgrip", "trace", "trim", "t.jsonl", "-o", "part.jsonl", "--steps", "1:3", cwd=tmp_path)
    part = load(tmp_path / "part.jsonl")
    assert ops_of(part).count("sin") == 2
    done = run_command("opgrip", "trace", "info", "part.jsonl", cwd=tmp_path)
    assert "2, for opgrip trace trim --steps" in done.stdout
