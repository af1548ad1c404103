"""Captures of parts of a long program: schedules, limits, decorated functions, and steps that the program reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from programs import run_command, succeed
from torch import nn

from opgrip.capture import Capture, Schedule
from opgrip.cli.command import counted
from opgrip.errors import UserError
from opgrip.traces import Trace, load, read
from opgrip.traces.analysis.trim import TracePart, trim
from opgrip.traces.analysis.validation import validate
from opgrip.traces.schema.arguments import tensors
from opgrip.traces.table.step_starts import find_step_starts

X = torch.ones(3)


def steps_of(path: Path, schedule: Schedule, steps: int = 12) -> list[int]:
    with Capture(path, schedule=schedule) as watched:
        for step in range(steps):
            X + step
            watched.step()
    trace = load(path, partial=False)
    by_number = {item.number: item.args[1] for item in trace.signatures}
    return [by_number[number] for number in trace.calls["signature"]]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (Schedule(), list(range(12))),
        (Schedule(skip=2, wait=1, active=2, repeat=2), [3, 4, 6, 7]),
        (Schedule(wait=5), [5, 11]),
        (Schedule(skip=3, repeat=1), [3]),
        (Schedule(skip=20), []),
    ],
)
def test_steps_selected_by_a_schedule_are_recorded(tmp_path: Path, schedule: Schedule, expected: list[int]) -> None:
    assert steps_of(tmp_path / "t.jsonl", schedule) == expected


def test_no_hook_is_active_between_recorded_steps(tmp_path: Path) -> None:
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    before = torch.nn.Module.__call__
    with Capture(tmp_path / "t.jsonl", schedule=Schedule(wait=1)) as watched:
        assert _get_current_dispatch_mode() is None
        assert torch.nn.Module.__call__ is before
        watched.step()
        assert _get_current_dispatch_mode() is not None


def test_schedule_without_active_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 active step"):
        Schedule(active=0)


@pytest.mark.parametrize("name", ["active", "warmup"])
@pytest.mark.parametrize("value", [2.0, "x", None])
def test_schedule_with_a_non_integer_number_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name}={value!r} is not an integer number of steps"):
        Schedule(**{name: value})


def test_trace_is_complete_when_its_schedule_ends(tmp_path: Path) -> None:
    with Capture(tmp_path / "t.jsonl", schedule=Schedule(repeat=1)) as watched:
        X + 1
        watched.step()
        assert len(load(tmp_path / "t.jsonl", partial=False).calls) == 1
        X + 2


def test_limits_end_the_recording_and_not_the_program(tmp_path: Path) -> None:
    results = []
    with Capture(tmp_path / "calls.jsonl", max_calls=1000) as watched:
        results += [X + step % 7 for step in range(3000)]
    assert len(results) == 3000
    assert watched.calls == 1000
    trace = load(tmp_path / "calls.jsonl", partial=False)
    assert len(trace.calls) == 1000
    assert trace.end is not None
    assert trace.end.stopped == "1,000 calls"
    with Capture(tmp_path / "bytes.jsonl", max_bytes=20_000):
        for step in range(3000):
            X + step % 7
    assert 20_000 <= (tmp_path / "bytes.jsonl").stat().st_size < 40_000
    done = run_command("opgrip", "trace", "info", tmp_path / "bytes.jsonl")
    assert "stopped     at 20000 bytes" in done.stdout


def test_decorated_function_records_exactly_its_calls(tmp_path: Path) -> None:
    watched = Capture(tmp_path / "t.jsonl")

    @watched
    def step(number: int) -> torch.Tensor:
        """Adds."""
        return X + number if number == 0 else step(number - 1)

    assert step.__doc__ == "Adds."
    step(2)
    X.sin()
    step(0)
    watched.close()
    assert load(tmp_path / "t.jsonl", partial=False).calls["op"].tolist() == ["aten.add.Tensor"] * 2


def various_calls(number: int) -> None:
    """Make calls of which every other one has a new signature."""
    for step in range(number):
        torch.ones(3 + step) + 1
        X.sin()


@pytest.mark.parametrize("most", [1, 30])
def test_trace_cut_by_max_calls_has_only_needed_records(tmp_path: Path, most: int) -> None:
    with Capture(tmp_path / "t.jsonl", max_calls=most) as watched:
        various_calls(50)
    trace = load(tmp_path / "t.jsonl", partial=False)
    assert len(trace.calls) == watched.calls == most
    assert {item.number for item in trace.signatures} == set(trace.calls["signature"])
    assert {item.number for item in trace.scopes} == set(trace.calls["scope"])
    assert watched.signatures == len(trace.signatures)
    assert watched.stopped == counted(most, "call")
    shapes = [spec.shape for item in trace.signatures for spec in tensors((item.args, item.outputs))]
    assert max(shape[0] for shape in shapes) <= 3 + most


@pytest.mark.parametrize("most", [1, 20_000])
def test_trace_exceeds_max_bytes_by_at_most_one_call(tmp_path: Path, most: int) -> None:
    with Capture(tmp_path / "t.jsonl", max_bytes=most) as watched:
        various_calls(2000)
    size = (tmp_path / "t.jsonl").stat().st_size
    # a header, one call with everything it needs, and the closing record
    assert most <= size <= most + 2_500
    trace = load(tmp_path / "t.jsonl", partial=False)
    assert len(trace.calls) == watched.calls >= 1
    assert {item.number for item in trace.signatures} == set(trace.calls["signature"])


def test_opcapture_reports_a_reached_limit(tmp_path: Path) -> None:
    (tmp_path / "steps.py").write_text("import torch\nfor size in range(9): torch.ones(size)\n", encoding="utf-8")
    done = succeed("opcapture", "--max-calls", "1", "--", "steps.py", cwd=tmp_path)
    lines = done.stderr.splitlines()
    assert lines[0].startswith("opcapture: 1 call of 1 signature, ")
    assert lines[1] == ("opcapture: the recording ended at the limit of 1 call: later calls of the program are missing")


def test_counts_exclude_marks_and_warmup_steps(tmp_path: Path) -> None:
    with Capture(tmp_path / "t.jsonl", schedule=Schedule(warmup=1, active=2)) as watched:
        for step in range(3):
            for _ in range(4):
                with torch.profiler.record_function("mark"):
                    X + step
            assert watched.calls == 4 * step
            watched.step()
    assert (watched.calls, watched.signatures, watched.marks) == (8, 2, 16)


def ops_of(trace: Trace) -> list[str]:
    return [name.split(".")[1] for name in trace.calls["op"].astype(str)]


def operators_by_step(path: Path) -> list[list[str]]:
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
    assert operators_by_step(tmp_path / "t.jsonl") == [["ones", *["sin"] * (step + 1)] for step in recorded]


def test_optimizer_steps_are_recorded(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    first, second = (torch.optim.SGD(model.parameters(), foreach=False) for _ in range(2))
    with Capture(tmp_path / "t.jsonl"):
        for step in range(3):
            run(step)
            model.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            second.step() if step == 1 else first.step()
    steps = operators_by_step(tmp_path / "t.jsonl")
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
