"""Captures of parts of a long program: schedules, limits, budgets, decorated functions, and reported steps."""

import argparse
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import pytest
import torch
from programs import run_command, succeed
from torch import nn

from opgrip.capture import Capture, Schedule
from opgrip.capture.command.opcapture import closing_lines
from opgrip.capture.on_demand.protocol import RecordingRequest
from opgrip.capture.on_demand.session import RecordingSession
from opgrip.capture.on_demand.settings import AgentSettings
from opgrip.capture.timing.budget import BURST_S, ENOUGH, Budget, StepTimes
from opgrip.capture.writing.flusher import INTERVAL_S
from opgrip.cli.command import counted
from opgrip.cli.option_types import percent
from opgrip.errors import UserError
from opgrip.replay import replay
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


SHARE = 0.1
WHOLE_NS = SHARE * BURST_S * 1e9  # budget with which a capture begins, in ns


@pytest.fixture
def spend(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return a function that sets the share of the initial budget that captures have used."""
    spent = [0.0]
    monkeypatch.setattr(Budget, "spent_ns", lambda self: spent[0] * WHOLE_NS)

    def spend(part: float) -> None:
        spent[0] = part

    return spend


def small_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 4))).eval()


def test_budget_recovers_over_time_up_to_the_initial_burst(spend: Callable[[float], None]) -> None:
    now_ns = 0
    budget = Budget(SHARE, lambda: 0, lambda: 0, lambda: now_ns)
    assert not budget.leaves_out_step()
    spend(1.1)
    assert [budget.leaves_out_step() for _ in range(5)] == [True] * 5
    now_ns += int(0.2 * BURST_S * 1e9)
    assert not budget.leaves_out_step()
    now_ns += int(100 * BURST_S * 1e9)
    budget.update()
    spend(2.2)
    assert budget.leaves_out_step()
    assert not budget.is_overdrawn
    spend(3.2)
    budget.update()
    assert budget.is_overdrawn
    assert budget.left_out == 6
    spend(0.0)
    budget.begin()
    assert (budget.leaves_out_step(), budget.left_out) == (False, 0)


def test_capture_over_budget_omits_whole_steps_and_reports_it(tmp_path: Path, spend: Callable[[float], None]) -> None:
    path, model = tmp_path / "t.jsonl", small_model()
    with torch.no_grad(), Capture(path, max_overhead=SHARE) as capture:
        for step in range(6):
            spend((0.0, 1.5, 0.6, 0.6, 0.0, 0.0)[step])
            model(torch.ones(2, 4))
            capture.step()
    trace = load(path, partial=False)
    assert trace.end is not None
    assert trace.end.thinned == {"steps": 1}
    assert "1 step left out, to take at most 0.1 of the time" in closing_lines(capture)
    assert list(trace.calls["op"]).count("aten.relu.default") == 5
    shown = run_command("opgrip", "trace", "info", path)
    assert "steps 1 time, due to --max-overhead" in " ".join(shown.stdout.split())
    assert set(replay(path, iterations=1, warmup=0).frame["status"]) == {"ok"}


def test_max_overhead_warns_if_the_program_marks_no_steps(tmp_path: Path, spend: Callable[[float], None]) -> None:
    with pytest.warns(RuntimeWarning, match=r"call step\(\)"), Capture(tmp_path / "t.jsonl", max_overhead=SHARE) as it:
        torch.ones(2).neg()
        spend(2.5)
        it.step()
    assert it.calls == 2


def test_on_demand_recording_over_budget_omits_steps(tmp_path: Path, spend: Callable[[float], None]) -> None:
    model = small_model()
    settings = AgentSettings("tested", str(tmp_path / "t-%n.jsonl"))
    request = RecordingRequest(steps=2, warmup=0, options={"max_overhead": SHARE})
    with ThreadPoolExecutor(1) as pool, torch.no_grad():
        session = RecordingSession(settings, request, 1, perf_counter_ns())
        session.begin()
        running = pool.submit(session.finish, lambda why: None)
        spend(1.5)
        for step in range(5):
            if step == 3:
                spend(0.0)
                # wait for a check by the writing thread
                time.sleep(1.5 * INTERVAL_S)
            model(torch.ones(2, 4))
        result = running.result()
    assert (result["steps"], result["problem"]) == (2, None)
    end = load(result["file"], partial=False).end
    assert end is not None
    assert end.thinned["steps"] == 3


def test_memory_limit_ends_the_recording_and_not_the_program(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    with Capture(path, max_memory=1 << 20) as capture:
        sizes = [torch.ones(size).neg().numel() for size in range(1, 400)]
        capture._write_now()
        torch.ones(500).neg()
    assert sizes[-1] == 399
    assert capture.stopped == f"{1 << 20} bytes of memory"
    trace = load(path, partial=False)
    assert trace.end is not None
    assert trace.end.stopped == capture.stopped
    assert (500,) not in {spec.shape for item in trace.signatures for spec in item.args if hasattr(spec, "shape")}


def test_overhead_option_takes_a_fraction_or_a_percentage() -> None:
    assert percent("5%") == percent("0.05") == 0.05
    for text in ("0%", "101%", "5", "x%", "nan"):
        with pytest.raises(argparse.ArgumentTypeError):
            percent(text)


class Program:
    """Steps of a thread whose processor time a test sets."""

    def __init__(self) -> None:
        self.now = 0
        self.measured = 0.0
        self.times = StepTimes(lambda: self.now)

    def step(self, is_recorded: bool | None, took: int, measured: int = 0) -> None:
        self.times.begin(is_recorded, self.measured)
        self.now += took
        if is_recorded:
            self.measured += measured

    def end(self) -> float | None:
        self.times.begin(None, self.measured)
        return self.times.extra_ns()


def test_few_steps_show_no_cost() -> None:
    program = Program()
    for is_recorded in [True, False, False, False] * (ENOUGH - 1):
        program.step(is_recorded, 10_000 if is_recorded else 1_000)
    assert program.end() is None


@pytest.mark.parametrize(("recorded", "extra"), [(1_450, 200), (1_250, 0), (1_000, 0)])
def test_equal_steps_show_the_cost_of_recording(recorded: int, extra: float) -> None:
    program = Program()
    for is_recorded in [True, False, False, False] * ENOUGH:
        program.step(is_recorded, recorded if is_recorded else 1_000, measured=250)
    assert program.end() == pytest.approx(extra)


def test_work_between_steps_is_ignored() -> None:
    program = Program()
    for is_recorded in [True, None, False, None, False, None, False, None] * ENOUGH:
        program.step(is_recorded, {True: 1_200, False: 1_000, None: 77_777}[is_recorded])
    assert program.end() == pytest.approx(200)


def test_steps_are_timed_separately_for_each_thread() -> None:
    times = StepTimes()

    def steps() -> None:
        for is_recorded, _ in zip(cycle([True, False, False, False]), range(8 * ENOUGH), strict=False):
            times.begin(is_recorded, 0)
            sum(range(20_000 if is_recorded else 10_000))
        times.begin(None, 0)

    threads = [threading.Thread(target=steps) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 1.2 < times._recorded.mean / times._left_out.mean < 3


def test_delays_of_following_steps_count_for_the_recorded_step() -> None:
    program = Program()
    for took in [1_400, 1_100, 1_100, 1_000, 1_000] * ENOUGH:
        program.step(took == 1_400, took)
    assert program.end() == pytest.approx(600)
