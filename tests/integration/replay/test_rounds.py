"""Rounds of timed runs: their order and number, disturbances, and the memory and ratio of compared functions."""

import itertools
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from busy import compared_times
from hypothesis import given
from hypothesis import strategies as st
from programs import ROOT, SUPPORT_PATH, run_python
from settings import rows_of, settings_of

from opgrip.capture import Capture
from opgrip.platform.contention import Waits
from opgrip.replay.cases.cases import Case, make_cases
from opgrip.replay.cases.preceding_calls import BEFORE, make_preceding_calls
from opgrip.replay.inputs.inputs import Inputs, device_map
from opgrip.replay.operators.lookup import Operator
from opgrip.replay.results.paired_ratio import EQUAL, FASTER, SLOWER, UNDECIDED, _joined_chance, paired_ratio
from opgrip.replay.results.results import Result
from opgrip.replay.run.measure import measure_cases
from opgrip.replay.timing import caches, disturbances, pages, stopwatch
from opgrip.replay.timing.caches import Caches, MemoryUse
from opgrip.replay.timing.ranges import Range
from opgrip.replay.timing.rounds import FunctionGroup, Measurer
from opgrip.replay.timing.samples import MOST_CONTENDED
from opgrip.replay.timing.stopwatch import LaunchTime, Stopwatch, block_size
from opgrip.replay.timing.timed_functions import InputSet, Run, TimedCase, TimedFunction, paired_runs
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
    now_ns = 0

    def read_ns(self) -> int:
        return self.now_ns

    def pass_by(self, time_ns: int) -> None:
        self.now_ns += time_ns


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
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

    def __init__(self, threads: None = None, workers: None = None) -> None:
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
    monkeypatch.setattr(disturbances, "Pace", Pace)
    monkeypatch.setattr(disturbances, "Contention", Contention)


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


def test_the_usable_cache_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPGRIP_CACHE", str(tmp_path))
    most = Caches("cpu").most
    monkeypatch.setattr(caches, "_measure_usable", None)
    assert Caches("cpu").most == most


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
from test_rounds import Contention, Effort, disturbances, measure, timed_function_of

disturbances.Contention = Contention
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


ROUNDS = 96


def timed_sine(number: int = 0, sets: int = 1, **rest: Any) -> TimedFunction:
    spec = TensorSpec((4,), (1,), torch.float32, "cpu")
    all_inputs = [Inputs((spec,), {}, {}, device_map("cpu", None), 0) for _ in range(sets)]
    for inputs in all_inputs:
        inputs.keep()
    options = {"mutates": False, "fresh": None, "result_bytes": 0} | rest
    return TimedFunction(number, "tested", "eager", torch.sin, [InputSet([item]) for item in all_inputs], **options)


@given(st.integers(1, 4), st.integers(0, 99))
def test_each_function_runs_in_each_memory_before_and_after_each_other(count: int, seed: int) -> None:
    functions = [timed_sine(exchanges="alike") for _ in range(count)]
    memory_of = {id(function.input_sets): place for place, function in enumerate(functions)}
    case, generator = TimedCase(functions), Random(seed)
    memories: Counter[tuple[int, int]] = Counter()
    orders: Counter[tuple[int, int]] = Counter()
    for _ in range(2 * count):
        order = case.next_round(generator)
        memories.update((functions.index(item), memory_of[id(item.input_sets)]) for item in order)
        assert len({id(item.input_sets) for item in order}) == count
        orders.update(
            (functions.index(one), functions.index(two)) for one in order for two in order[order.index(one) + 1 :]
        )
    assert set(memories.values()) == {2}
    assert len(memories) == count**2
    assert set(orders.values()) <= {count}


def test_functions_with_unequal_arguments_keep_their_memory() -> None:
    functions = [timed_sine(exchanges=kind) for kind in ("forward", "backward", None, None)]
    own = [function.input_sets for function in functions]
    case = TimedCase(functions)
    for number in range(4):
        case.next_round(Random(0))
        assert all(function.input_sets is kept for function, kept in zip(functions, own, strict=True))
        assert {function.round for function in functions} == {number}


def test_memory_of_a_failed_function_is_released_and_the_others_go_on() -> None:
    functions = [timed_sine(exchanges="alike") for _ in range(3)]
    case, generator = TimedCase(functions), Random(0)
    case.next_round(generator)
    functions[1].fail(RuntimeError("planted"), "cpu")
    for _ in range(5):
        case.next_round(generator)
        assert functions[1].input_sets == ()
        assert functions[0].input_sets is not functions[2].input_sets
        assert list(case.active) == [functions[0], functions[2]]


def test_call_before_a_timed_one_uses_the_memory_of_all_partners() -> None:
    seen: set[int] = set()
    functions = [timed_sine(exchanges="alike") for _ in range(2)]
    functions[0].function = lambda tensor: seen.add(tensor.data_ptr())
    case, generator = TimedCase(functions), Random(0)
    case.next_round(generator)
    for _ in range(20):
        functions[0].run_before(generator)
    assert len(seen) == 2


def test_runs_are_compared_within_a_round_and_with_the_same_values() -> None:
    def runs(*items: tuple[int, bool, float, int]) -> list[Run]:
        return [Run((index, fresh), time_ns, number, number % 4) for index, fresh, time_ns, number in items]

    base = runs((0, False, 1.0, 0), (1, False, 10.0, 1), (0, False, 2.0, 2), (1, True, 30.0, 3))
    own = runs((0, False, 3.0, 0), (1, False, 11.0, 1), (0, True, 4.0, 2), (0, True, 5.0, 3), (0, False, 6.0, 4))
    assert [(one.time_ns, two.time_ns) for one, two in paired_runs(own, base)] == [(3.0, 1.0), (11.0, 10.0)]
    # one has only runs with new pages, the other few
    fresh = runs((0, True, 20.0, 0), (1, True, 5.0, 1), (1, True, 7.0, 2))
    assert [(one.time_ns, two.time_ns) for one, two in paired_runs(fresh, base)] == [(20.0, 1.0), (5.0, 10.0)]


def test_functions_of_a_round_run_on_the_same_values_also_after_dropped_runs() -> None:
    watch, generator = Stopwatch(DISCRETE, lambda: None, 0.0), Random(0)
    functions = [timed_sine(sets=3, exchanges="alike") for _ in range(2)]
    case = TimedCase(functions)
    for number in range(30):
        for function in case.next_round(generator):
            stratum, time_ns = function.time(watch, lambda: None)
            if (number, function) != (7, functions[1]):
                function.keep(Run(stratum, time_ns, function.round, function.arrangement))
    pairs = paired_runs(*(function.runs for function in functions))
    assert len(pairs) == 29
    assert all(one.stratum == two.stratum for one, two in pairs)
    assert {one.stratum[0] for one, _ in pairs} == {0, 1, 2}


def timed_pairs(factor: float, generator: Random, count: int = ROUNDS) -> list[tuple[int, float, float]]:
    """Return pairs of runs of two functions, of which the first takes `factor` times as long as the second.

    One memory is 15 % slower than the other, the second run of a round 5 % faster than the first, and one run in forty
    is disturbed.
    """

    def time_us(memory: int, is_second: int) -> float:
        disturbed = 1.0 if generator.random() < 1 / 40 else 0.0
        return 100 * (1.15 if memory else 1.0) * (0.95 if is_second else 1.0) * (generator.gauss(1, 0.02) + disturbed)

    return [
        (number % 4, factor * time_us(number % 2, number // 2 % 2), time_us(1 - number % 2, 1 - number // 2 % 2))
        for number in range(count)
    ]


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, EQUAL), (1.06, SLOWER), (0.94, FASTER), (1.2, SLOWER)])
def test_memory_and_order_do_not_change_the_verdict(factor: float, verdict: str) -> None:
    for seed in range(50):
        ratio = paired_ratio(timed_pairs(factor, Random(seed)), 100.0, are_exchanged=True)
        assert ratio is not None
        assert ratio.verdict == verdict, (seed, ratio)
        assert ratio.middle == pytest.approx(factor, rel=0.02)
        assert ratio.interval[0] < ratio.middle < ratio.interval[1]
        # the spread is that of the runs, not that of the memories
        assert 0.93 * factor < ratio.low < ratio.middle < ratio.high


def test_few_pairs_or_one_memory_each_decide_only_large_differences() -> None:
    few = paired_ratio(timed_pairs(1.06, Random(0), 12), 100.0, are_exchanged=True)
    kept = paired_ratio(timed_pairs(1.06, Random(0)), 100.0, are_exchanged=False)
    large = paired_ratio(timed_pairs(1.3, Random(0)), 100.0, are_exchanged=False)
    assert few is not None
    assert kept is not None
    assert large is not None
    assert (few.verdict, kept.verdict, large.verdict) == (UNDECIDED, UNDECIDED, SLOWER)
    assert few.error > 0.04


def test_runs_as_short_as_the_clock_are_not_compared() -> None:
    assert paired_ratio([(0, 0.0, 1.0), (1, 1.0, 0.0)], 1.0, are_exchanged=True) is None
    assert paired_ratio([], 1.0, are_exchanged=True) is None
    one = paired_ratio([(0, 2.0, 1.0)], 100.0, are_exchanged=True)
    assert one is not None
    assert (one.middle, one.chance, one.verdict) == (pytest.approx(2.0), 1.0, UNDECIDED)


@pytest.mark.parametrize(("own", "joined"), [([1.0], 1.0), ([0.01], 0.01), ([1.0, 1.0], 1.0), ([0.05, 0.05], 0.0175)])
def test_chances_of_repeats_are_joined(own: list[float], joined: float) -> None:
    assert _joined_chance(own) == pytest.approx(joined, rel=0.01)


def test_call_before_a_timed_run_leaves_its_arguments_as_they_were() -> None:
    values: list[list[float]] = []
    function = timed_sine(mutates=True)
    function.function = lambda x: (values.append(x.tolist()), x.add_(1))
    watch = Stopwatch(DISCRETE, lambda: None, 0.0)
    for _ in range(3):
        function.time(watch, lambda: function.run_before(Random(0)))
    assert values == [values[0]] * 3
