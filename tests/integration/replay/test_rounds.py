"""Tests of timed runs: the state at the begin of a run, work outside of the timed part, and repetition of runs."""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from busy import compared_times
from programs import ROOT, SUPPORT_PATH, run_python
from settings import rows_of, settings_of

from opgrip.capture import Capture
from opgrip.platform.contention import Waits
from opgrip.replay.cases.cases import Case, make_cases
from opgrip.replay.cases.preceding_calls import BEFORE, make_preceding_calls
from opgrip.replay.inputs.inputs import Inputs, device_map
from opgrip.replay.operators.lookup import Operator
from opgrip.replay.results.results import Result
from opgrip.replay.run.measure import measure_cases
from opgrip.replay.timing import pages, rounds, stopwatch
from opgrip.replay.timing.caches import Caches, MemoryUse
from opgrip.replay.timing.ranges import Range
from opgrip.replay.timing.rounds import FunctionGroup, Measurer
from opgrip.replay.timing.samples import MOST_CONTENDED
from opgrip.replay.timing.stopwatch import LaunchTime, Stopwatch, block_size
from opgrip.replay.timing.timed_functions import InputSet, TimedFunction
from opgrip.replay.timing.timing_options import COLD, CONTINUOUS, DISCRETE, WARM, Effort
from opgrip.traces import load
from opgrip.traces.schema.arguments import TensorSpec

SLEEPS = (lambda *args: time.sleep(0.1), lambda *args: None)
PLACE = device_map("cpu", None)
FEW = Effort(warmup=0, iterations=4)


def cases_of(folder: Path, program: Callable[[], object]) -> list[Case]:
    with Capture(folder / "t.jsonl"):
        program()
    return make_cases(load(folder / "t.jsonl"))


def results(folder: Path, program: Callable[[], object], **settings: Any) -> dict[str, Result]:
    wanted = settings_of(**({"warmup": 0, "iterations": 4} | settings))
    return {f"{row.op} {row.values} {row.direction}": row for row in rows_of(cases_of(folder, program), wanted)}


def timed_function_of(function: Callable[..., Any], mutates: bool = False, **rest: Any) -> TimedFunction:
    vector = TensorSpec((4,), (1,), torch.float32, "cpu")
    inputs = Inputs((vector,), {}, {}, PLACE, 0)
    inputs.keep()
    options = {"fresh": None, "result_bytes": 0} | rest
    return TimedFunction(0, "tested", "eager", function, [InputSet([inputs])], mutates, **options)


def measurer_of(effort: Effort, announce: Any = None, method: str = DISCRETE, **options: Any) -> Measurer:
    return Measurer(
        Stopwatch(method, lambda: None, 0.0),
        effort,
        options.pop("caches", None),
        announce or (lambda number, row: None),
        **options,
    )


def measure(function: TimedFunction, method: str = DISCRETE, effort: Effort = FEW, announce: Any = None) -> None:
    list(measurer_of(effort, announce, method).one_by_one([FunctionGroup({}, False, [function])]))


@pytest.mark.parametrize("method", [DISCRETE, CONTINUOUS])
def test_mutating_operator_gets_the_initial_argument_at_every_run(method: str) -> None:
    seen: list[float] = []

    def doubled(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor[0].item())
        return tensor.mul_(2)

    measure(timed_function_of(doubled, mutates=True), method)
    assert len(seen) >= 4
    assert len(set(seen)) == 1


def test_each_mode_of_a_case_is_timed_as_often_as_requested() -> None:
    # every second run is repeated, because the device is slow
    throttled = itertools.cycle([False, True])
    functions = [timed_function_of(lambda tensor: tensor.sin()) for _ in range(3)]
    measurer = measurer_of(FEW, is_throttled=lambda: next(throttled))
    list(measurer.one_by_one([FunctionGroup({}, False, functions)]))
    assert [len(function.samples) for function in functions] == [4, 4, 4]


class Clock:
    """Clock that advances only when a test says so."""

    now_ns = 0

    def read_ns(self) -> int:
        return self.now_ns

    def pass_by(self, time_ns: int) -> None:
        self.now_ns += time_ns


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return the clock that times the runs."""
    clock = Clock()
    monkeypatch.setattr(stopwatch, "perf_counter_ns", clock.read_ns)
    return clock


def test_preparing_arguments_and_freeing_results_is_not_timed(clock: Clock) -> None:
    freed: list[int] = []

    class Slow:
        def __del__(self) -> None:
            clock.pass_by(1000)
            freed.append(0)

    def prepare(arguments: Any) -> Any:
        clock.pass_by(1000)
        return arguments

    def run(_: torch.Tensor) -> Slow:
        clock.pass_by(7)
        return Slow()

    function = timed_function_of(run, enter=prepare, enters_each_run=True)
    measure(function)
    assert [run.time_ns for run in function.runs] == [7] * 4
    assert len(freed) >= 4


@pytest.mark.alone
def test_blocks_of_runs_take_as_long_per_run_as_single_runs() -> None:
    tensor = torch.randn(64, 64)
    ratios, sizes, shares = [], [], []
    for _ in range(7):
        alone, together = (timed_function_of(lambda _: tensor @ tensor) for _ in range(2))
        measure(alone, DISCRETE, Effort(iterations=10))
        measure(together, CONTINUOUS, Effort(iterations=3))
        alone_us = alone.samples.quantile_us(0.5)
        sizes.append(together._size)
        shares.append(together._size / block_size(1e3 * alone_us))
        ratios.append(together.samples.quantile_us(0.5) / alone_us)
    with compared_times():
        # only the first run, which takes longer, determines the number of runs in a block
        assert statistics.median(sizes) > 1, sizes
        assert statistics.median(shares) > 0.15, shares
        assert 0.4 < statistics.median(ratios) < 1.6, ratios


def test_failing_run_ends_only_its_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[int] = []
    original = TimedFunction.time

    def failing(function: TimedFunction, *args: Any) -> Any:
        runs.append(function.number)
        if function.label.startswith("aten.cos") and len(runs) > 5:
            raise RuntimeError("planted")
        return original(function, *args)

    monkeypatch.setattr(TimedFunction, "time", failing)
    rows = results(tmp_path, lambda: (torch.ones(3).cos(), torch.ones(4).sin()))
    assert rows["aten.cos.default recorded forward"].status == "failed"
    assert rows["aten.cos.default recorded forward"].error == "RuntimeError: planted"
    assert rows["aten.sin.default recorded forward"].samples == 4


class Pace:
    """Processor that is slowed down at some checks."""

    slowed: Callable[[int], bool] = staticmethod(lambda check: False)

    def __init__(self) -> None:
        self.checks = 0

    def is_slowed(self) -> bool:
        self.checks += 1
        return Pace.slowed(self.checks)


class Contention:
    """Machine with contention in some of the queried spans, or in none."""

    contended: Callable[[int], bool] = staticmethod(lambda check: False)
    has_room = True
    is_shared = False

    def __init__(self, workers: None = None) -> None:
        self.checks = 0

    def read(self) -> Waits:
        return Waits(time.perf_counter_ns(), 0, 0)

    def is_contended(self, since: Waits | None = None, run_ns: float | None = None) -> bool:
        self.checks += 1
        return Contention.contended(self.checks)

    def is_run_contended(self, marks: Sequence[Waits], run_ns: float) -> bool:
        return self.is_contended(marks[-1], run_ns)

    def close(self) -> None:
        pass


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a machine without contention."""
    monkeypatch.setattr(rounds, "Pace", Pace)
    monkeypatch.setattr(rounds, "Contention", Contention)


@pytest.mark.usefixtures("quiet")
def test_runs_on_a_slowed_processor_are_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pace, "slowed", staticmethod(lambda check: check <= 3))
    function = timed_function_of(torch.sin)
    measure(function)
    assert (len(function.samples), function.samples.dropped) == (4, 3)


@pytest.mark.usefixtures("quiet")
def test_permanently_slow_processor_is_measured_and_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Pace, "slowed", staticmethod(lambda check: True))
    row = results(tmp_path, lambda: torch.ones(300).sin())["aten.sin.default recorded forward"]
    assert (row.status, row.samples, row.dropped, row.slowed, row.is_slowed) == ("ok", 4, 4, 1.0, True)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("options", [{}, {"cache": "warm"}])
def test_row_with_only_contended_runs_is_contended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(Contention, "contended", staticmethod(lambda check: True))
    row = results(tmp_path, lambda: torch.ones(300).sin(), budget=0.01, **options)["aten.sin.default recorded forward"]
    assert (row.status, row.stopped, row.slowed, row.ratio, row.gb_per_s) == ("contended", "contended", 1.0, None, None)
    assert row.median_us
    assert row.samples >= 4


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("reading", ["one_by_one", "in_rounds"])
def test_clean_runs_between_contended_ones_are_used(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, reading: str
) -> None:
    runs: list[int] = []

    def run(_: torch.Tensor) -> None:
        runs.append(len(runs))
        # a time slice of the scheduler, except in every tenth run
        clock.pass_by(1000 if is_clean() else 4_000_000)

    def is_clean() -> bool:
        return len(runs) % 10 == 0

    monkeypatch.setattr(Contention, "contended", staticmethod(lambda check: not is_clean()))
    function = timed_function_of(run)
    measurer = measurer_of(Effort(warmup=0))
    list(getattr(measurer, reading)([FunctionGroup({}, False, [function])]))
    assert not function.samples.is_contended
    assert function.samples.quantile_us(0.5) == 1.0
    assert function.samples.dropped > 50


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("reading", ["one_by_one", "in_rounds"])
def test_repetition_stops_if_the_first_cases_remain_contended(monkeypatch: pytest.MonkeyPatch, reading: str) -> None:
    monkeypatch.setattr(Contention, "contended", staticmethod(lambda check: True))
    runs: list[int] = []
    functions = [timed_function_of(lambda *args: runs.append(0)) for _ in range(30)]
    for number, function in enumerate(functions):
        function.number = number
    measurer = measurer_of(Effort(warmup=0))
    settled = list(getattr(measurer, reading)([FunctionGroup({}, False, functions)]))
    assert sorted(case[0].number for case in settled) == list(range(30))
    assert all(function.samples.is_contended for function in functions)
    first_runs = len(functions) * MOST_CONTENDED
    assert first_runs < len(runs) < first_runs * 1.3


def test_case_runs_after_its_preceding_calls_of_the_program(tmp_path: Path) -> None:
    x = torch.ones(5)

    def program() -> None:
        for _ in range(3):
            for operator in (torch.sin, torch.cos, torch.tan, torch.exp, torch.neg, torch.abs):
                operator(x)

    cases = cases_of(tmp_path, program)
    trace = load(tmp_path / "t.jsonl")
    op = {case.number: case.op.split(".")[1] for case in cases}
    (wanted,) = [case for case in cases if op[case.number] == "abs"]
    surroundings = make_preceding_calls(trace)
    announced: list[str] = []
    settings = settings_of(warmup=0, iterations=4)
    rows_of([wanted], settings, surroundings, lambda number, row: announced.append(op[number]))
    # the case is announced again after the calls before it
    rounds_of = announced[-(BEFORE + 2) * 4 :]
    assert rounds_of == ["abs", "cos", "tan", "exp", "neg", "abs"] * 4


def test_memory_distances_are_the_bytes_that_the_program_used_since(tmp_path: Path) -> None:
    weights, other, table = torch.ones(1 << 20), torch.ones(1 << 22), torch.ones(1 << 18, 16)

    def program() -> None:
        weights.neg()
        other.neg()
        hidden = torch.ones(1000).sin()
        hidden * weights[:1000]
        table[torch.arange(10)]

    cases_of(tmp_path, program)
    trace = load(tmp_path / "t.jsonl")
    places = make_preceding_calls(trace).places
    place = {case.op: places[case.number][0] for case in make_cases(trace)}
    # the first argument was just created; the other was read before 16 MB of other data and their negatives
    new, old = place["aten.mul.Tensor"].distances
    assert new == 0
    assert old is not None
    assert 4 * other.nbytes > old >= 2 * other.nbytes
    # its result gets the memory that the argument of the sine had
    assert place["aten.mul.Tensor"].of_result == 0
    # its rows are used in any order
    assert (place["aten.index.Tensor"].distances[0] or 0) > table.nbytes - 1000
    lines = (tmp_path / "t.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "damaged.jsonl").write_text("".join(line for line in lines if '"aten.sin.default"' not in line))
    with pytest.warns(UserWarning, match="damaged"):
        damaged = load(tmp_path / "damaged.jsonl")
    assert sum(map(len, make_preceding_calls(damaged).places.values())) == sum(map(len, places.values())) - 1


@pytest.mark.parametrize("runs_before", [False, True])
def test_memory_is_used_in_the_programs_order_before_a_run(runs_before: bool) -> None:
    caches, used = Caches("cpu"), list[tuple[str, int]]()
    most, before = caches.most, MemoryUse(3 << 20, lambda: used.append(("before", caches.used >> 20)))

    def use(name: str, distance: int, age: int) -> MemoryUse:
        return MemoryUse(1 << 20, lambda: used.append((name, caches.used >> 20)), distance, age)

    # what is not where it was in the program is evicted first
    uses = [use("near", 1 << 20, 0), use("far", 9 << 20, most), use("cold", most, 0)]
    caches.restore(uses, before if runs_before else None)
    first = most >> 20
    if runs_before:
        assert used == [("far", first), ("before", first + 7), ("near", first + 7)]
    else:
        assert used == [("far", first), ("near", first + 8)]
        assert caches.used == most + (10 << 20)
    used.clear()
    caches.restore([use("near", 1 << 20, 1 << 20), use("cold", most, most)], None)
    assert used == []
    # the eviction for one argument also moves another, which was where it was in the program
    caches.restore([use("kept", 20 << 20, 20 << 20), use("moved", 2 << 20, 20 << 20)], None)
    assert [name for name, _ in used] == ["kept", "moved"]


def test_calls_with_sparse_arguments_are_timed() -> None:
    rows = torch.eye(3).to_sparse_csr()
    watch, runs = Stopwatch(DISCRETE, lambda: None, 0.0), [((rows, torch.ones(3, 2)), {})]
    assert watch.time(torch.mm, runs, Range("", "", 0), LaunchTime()) > 0


@pytest.mark.usefixtures("quiet")
def test_caches_are_emptied_before_a_cold_run(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    function, caches = timed_function_of(lambda _: clock.pass_by(7)), Caches("cpu")
    list(measurer_of(FEW, caches=caches, cold=True).one_by_one([FunctionGroup({}, False, [function])]))
    assert caches.used > 0.9 * len(function.runs) * caches.most
    assert [run.time_ns for run in function.runs] == [7] * 4


FRESH_OR_USED = """
import sys
import torch
from opgrip.replay.timing import pages
from test_rounds import Contention, Effort, measure, rounds, timed_function_of

rounds.Contention = Contention
pages.keep_freed_memory()
size, share = 8 << 20, float(sys.argv[1])
function = timed_function_of(lambda _: torch.ones(size // 4), fresh=share, result_bytes=size)
measure(function, effort=Effort(iterations=12))
print(sum(len(times) for (_, fresh), times in function.samples.times.items() if fresh == (share == 1.0)))
"""


@pytest.mark.skipif(not pages.CONTROLLED, reason="the C library is not glibc")
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_results_get_new_memory_in_the_recorded_share_of_runs(share: float) -> None:
    folders = os.pathsep.join((str(Path(__file__).parent), SUPPORT_PATH, str(ROOT / "benchmarks")))
    done = run_python("-c", FRESH_OR_USED, share, env={**os.environ, "PYTHONPATH": folders})
    assert int(done.stdout) >= 9, done.stderr


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("cache", [WARM, COLD])
def test_row_has_its_method_and_cache(tmp_path: Path, cache: str) -> None:
    rows = results(tmp_path, lambda: torch.ones(300).sin(), cache=cache, iterations=5)
    row = rows["aten.sin.default recorded forward"]
    assert (row.method, row.cache, row.samples, row.runs, row.stopped) == (DISCRETE, cache, 5, 5, "iterations")
    assert row.spread is not None
    assert row.p10_us is not None
    assert row.median_us is not None
    assert row.p90_us is not None
    assert row.p10_us <= row.median_us <= row.p90_us


@pytest.mark.alone
def test_value_variants_run_in_the_same_rounds_and_are_compared(tmp_path: Path) -> None:
    mask = torch.arange(200_000) % 100 == 0
    rows = results(tmp_path, mask.nonzero, values=("recorded", "random", "zeros"), warmup=2, iterations=15)
    recorded, random, zeros = (rows[f"aten.nonzero.default {kind} forward"] for kind in ("recorded", "random", "zeros"))
    assert [row.faithful for row in (recorded, random, zeros)] == [True, False, False]
    assert recorded.ratio is None
    assert random.ratio is not None
    assert zeros.ratio is not None
    with compared_times():
        assert random.ratio > 1.5
        assert zeros.ratio < 1.0


def test_memory_columns_show_allocated_and_peak_bytes(tmp_path: Path) -> None:
    a, b = torch.randn(100, 50), torch.randn(50, 200)
    row = results(tmp_path, lambda: a @ b, memory=True)["aten.mm.default recorded forward"]
    assert row.allocated_bytes == row.peak_bytes == 100 * 200 * 4
    assert (row.bytes_in, row.bytes_out) == ((100 * 50 + 50 * 200) * 4, 100 * 200 * 4)
    a.requires_grad_()
    (tmp_path / "gradients").mkdir()
    rows = results(tmp_path / "gradients", lambda: a @ b, memory=True, backward=True)
    # the gradient of one factor
    assert rows["aten.mm.default recorded backward"].allocated_bytes == 100 * 50 * 4


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("cache", ["program", "warm"])
def test_case_returns_its_rows_before_others_are_done(tmp_path: Path, cache: str) -> None:
    x = torch.ones(5)
    cases = cases_of(tmp_path, lambda: (x.sin(), x.cos()))
    slow, quick = (replace(case, operator=Operator(sleep, False)) for case, sleep in zip(cases, SLEEPS, strict=True))
    announced: list[int] = []
    # three runs of the slow case use up its budget; the quick case has ten
    settings = settings_of(warmup=0, budget=0.25, precision=1e-9, cache=cache)
    rows = measure_cases([slow, quick], settings, None, lambda number, row: announced.append(number))
    assert next(rows)[0].case == slow.number
    early = announced.count(quick.number)
    assert next(rows)[0].case == quick.number
    assert announced.count(quick.number) >= early + 5
