"""Timed runs: how many a case needs, runs that are concurrent, and contention with other programs."""

import os
import threading
from collections.abc import Callable
from contextlib import closing
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from busy import compared_times
from hypothesis import given
from hypothesis import strategies as st
from others import busy_processors

from opgrip.platform import contention
from opgrip.platform.contention import Contention, let_threads_sleep
from opgrip.replay.inputs.inputs import Inputs, device_map
from opgrip.replay.timing import disturbances
from opgrip.replay.timing.concurrent import ConcurrentRun, measure_concurrently
from opgrip.replay.timing.rounds import FunctionGroup
from opgrip.replay.timing.samples import FEWEST, FEWEST_LONG, LEAST, Samples, trim
from opgrip.replay.timing.timed_functions import InputSet, TimedFunction
from opgrip.replay.timing.timing_options import Effort
from opgrip.traces.schema.arguments import TensorSpec

FEW = Effort(iterations=5)
ONE_THREAD = {"threads": 1}


class Pace:
    def is_slowed(self) -> bool:
        return False


@pytest.fixture(autouse=True)
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    # otherwise repeats are discarded and run again on a busy machine
    monkeypatch.setattr(disturbances, "Pace", Pace)


def timed_function_of(function: Callable[..., Any], number: int = 0, mutates: bool = False) -> TimedFunction:
    vector = TensorSpec((4,), (1,), torch.float32, "cpu")
    inputs = Inputs((vector,), {}, {}, device_map("cpu", None), 0)
    inputs.keep()
    return TimedFunction(number, "tested", "eager", function, [InputSet([inputs])], mutates, None, 0)


def measured(
    *timed_functions: TimedFunction, count: int = 2, grad: bool = False, **settings: Any
) -> list[ConcurrentRun]:
    group = FunctionGroup({**ONE_THREAD, **settings}, grad, list(timed_functions))
    return list(measure_concurrently([group], count, FEW, "cpu"))


def busy(_: torch.Tensor) -> int:
    """Hold the interpreter lock for longer than its switch interval, in many bytecodes."""
    total = 0
    for number in range(300_000):
        total += number
    return total


def locked(_: torch.Tensor) -> int:
    """Hold the interpreter lock in a single call that does not release it."""
    return sum(range(1_000_000))


def test_kernels_run_concurrently_and_are_each_timed_under_load() -> None:
    matrix = torch.randn(400, 400)
    # one for the first repeat, where each runs once to time all at once, and one to time each under load
    meetings = [threading.Barrier(2), threading.Barrier(2)]

    def numbered(number: int) -> TimedFunction:
        ahead = iter(meetings)

        def kernel(_: torch.Tensor) -> torch.Tensor:
            if threading.current_thread() is not threading.main_thread() and (meeting := next(ahead, None)):
                # breaks if the other one does not arrive while this one runs
                meeting.wait(30)
            return matrix @ matrix

        return timed_function_of(kernel, number)

    rows = measured(numbered(0), numbered(1))
    assert [row.timed_function.number for row in rows] == [0, 1]
    for row in rows:
        assert row.timed_function.failure is None
        assert row.together == 2
        assert len(row.loaded) == 5
        assert row.overlap is not None


@pytest.mark.alone
@pytest.mark.parametrize("function", [pytest.param(busy, marks=pytest.mark.slow), locked])
def test_function_that_holds_the_interpreter_lock_does_not_overlap(function: Callable[..., Any]) -> None:
    rows = measured(*(timed_function_of(function, number) for number in range(3)), count=3)
    overlaps = [row.overlap for row in rows if row.overlap is not None]
    with compared_times():
        assert len(overlaps) == 3
        assert 0.4 < min(overlaps) <= max(overlaps) < 1.6


@pytest.mark.alone
def test_short_call_runs_until_the_longest_is_done() -> None:
    runs: list[str] = []

    def short(_: torch.Tensor) -> None:
        runs.append(threading.current_thread().name)
        torch.ones(1000).sort()

    matrix = torch.randn(700, 700)
    measured(timed_function_of(short), timed_function_of(lambda _: matrix @ matrix @ matrix, 1))
    alone = runs.count(threading.current_thread().name)
    with compared_times():
        # there are as many concurrent as single runs, and many more under load
        assert len(runs) - alone > 2 * alone


def test_functions_run_in_batches_in_order() -> None:
    announced: list[int] = []
    group = FunctionGroup(ONE_THREAD, False, [timed_function_of(torch.sin, number) for number in range(5)])
    rows = list(measure_concurrently([group], 2, FEW, "cpu", lambda number, row: announced.append(number)))
    assert [row.together for row in rows] == [2, 2, 2, 2, 1]
    assert list(dict.fromkeys(announced)) == [0, 1, 2, 3, 4]


def test_failing_function_does_not_affect_others() -> None:
    runs: list[int] = []

    def failing(_: torch.Tensor) -> None:
        runs.append(0)
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("planted")

    def at_once(_: torch.Tensor) -> None:
        raise ValueError("at once")

    rows = measured(timed_function_of(failing), timed_function_of(torch.sin, 1), timed_function_of(at_once, 2), count=3)
    assert [str(row.timed_function.failure) for row in rows] == ["planted", "None", "at once"]
    assert [len(row.loaded) for row in rows] == [0, 5, 0]
    assert rows[1].overlap is not None


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("inference", [True, False])
def test_threads_have_the_settings_of_their_group(grad: bool, inference: bool) -> None:
    met = set()

    def asked(_: torch.Tensor) -> None:
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_num_threads()
        met.add((threading.current_thread() is threading.main_thread(), *modes, torch.get_default_dtype()))

    before = torch.get_num_threads()
    measured(
        timed_function_of(asked), timed_function_of(asked, 1), grad=grad, inference=inference, default_dtype="float64"
    )
    assert met == {(main, grad, inference, 1, torch.float64) for main in (True, False)}
    assert (torch.get_num_threads(), torch.get_default_dtype()) == (before, torch.float32)


def test_mutating_call_gets_its_initial_argument() -> None:
    seen = set()

    def doubled(tensor: torch.Tensor) -> torch.Tensor:
        seen.add(tensor[0].item())
        return tensor.mul_(2)

    measured(timed_function_of(doubled, mutates=True), timed_function_of(torch.sin, 1))
    assert len(seen) == 1


def test_interrupt_ends_all_threads() -> None:
    def interrupted(_: torch.Tensor) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise KeyboardInterrupt

    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        measured(timed_function_of(interrupted), timed_function_of(torch.cos, 1))
    assert threading.active_count() == before


MS = 1_000_000


class Machine:
    """Fake of the kernel's accounting of a process with two threads, with a clock that the test advances."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0
        self._folder = folder
        self._waits = {"7": [0, 0], "8": [0, 0]}
        self._busy_ticks = self._stolen_ticks = 0
        monkeypatch.setattr(contention, "perf_counter_ns", lambda: self.now)
        monkeypatch.setattr(contention, "process_time_ns", lambda: 0)
        self.passes(0)

    def passes(
        self, span_ns: int, waited_ns: int = 0, waits: int = 0, stolen_ticks: int = 0, busy_ticks: int = 0
    ) -> None:
        self.now += span_ns
        self._waits["8"][0] += waited_ns
        self._waits["8"][1] += waits
        self._stolen_ticks += stolen_ticks
        self._busy_ticks += busy_ticks
        for thread, (time, times) in self._waits.items():
            task = self._folder / "self" / "task" / thread
            task.mkdir(parents=True, exist_ok=True)
            (task / "schedstat").write_text(f"123 {time} {times}\n")
        counts = f"{self._busy_ticks} 2 3 4 5 6 7 {self._stolen_ticks} 0 0"
        lines = [f"cpu{number} {counts}" for number in sorted(os.sched_getaffinity(0))]
        (self._folder / "stat").write_text("\n".join(["cpu 1 2 3 4 5 6 7 8 0 0", *lines]) + "\n")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    return Machine(tmp_path, monkeypatch)


def test_waiting_for_a_processor_is_contention_and_waking_up_is_not(machine: Machine, tmp_path: Path) -> None:
    with closing(Contention(tmp_path)) as watch:
        machine.passes(2 * MS)
        assert not watch.is_contended()
        machine.passes(2 * MS, waited_ns=4 * MS, waits=1)
        assert watch.is_contended()
        machine.passes(2 * MS)
        assert not watch.is_contended()
        machine.passes(2 * MS, waited_ns=2 * MS, waits=40)
        assert not watch.is_contended()


def test_contention_is_judged_for_any_span_and_part(machine: Machine, tmp_path: Path) -> None:
    with closing(Contention(tmp_path)) as watch:
        start = watch.read()
        machine.passes(100 * MS, waited_ns=4 * MS, waits=1)
        assert not watch.is_contended(start)
        assert watch.is_contended(start, run_ns=MS)
        assert not watch.is_contended(run_ns=MS)


def test_own_threads_beyond_the_processors_are_not_contention(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1 + len(os.sched_getaffinity(0)))
    with closing(Contention(tmp_path)) as watch:
        machine.passes(300 * MS, waited_ns=4 * MS, waits=1)
        assert not watch.is_contended()
        # then only the time used by other programs shows contention
        machine.passes(300 * MS, busy_ticks=10)
        assert watch.is_contended()


def test_room_for_own_threads_depends_on_other_programs(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processors = len(os.sched_getaffinity(0))
    for threads, has_room in ((processors, False), (max(processors // 2, 1), processors > 1)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        with closing(Contention(tmp_path)) as watch:
            machine.passes(300 * MS)
            assert (watch.has_room, watch.is_shared) == (True, False)
            machine.passes(300 * MS, busy_ticks=14)
            assert (watch.has_room, watch.is_shared) == (has_room, True)


def test_stolen_time_of_a_hypervisor_is_contention(machine: Machine, tmp_path: Path) -> None:
    with closing(Contention(tmp_path)) as watch:
        machine.passes(300 * MS, stolen_ticks=15)
        assert watch.is_contended()
        machine.passes(300 * MS)
        assert not watch.is_contended()


def test_workers_are_watched_instead_and_are_not_other_programs(machine: Machine, tmp_path: Path) -> None:
    counts = tmp_path / "41" / "task" / "41" / "schedstat"
    counts.parent.mkdir(parents=True)
    counts.write_text("0 0 0\n")
    with closing(Contention(tmp_path, workers=lambda: [41])) as watch:
        machine.passes(300 * MS, waited_ns=100 * MS, waits=1)
        assert not watch.is_contended()
        counts.write_text(f"{300 * MS * len(os.sched_getaffinity(0))} 0 0\n")
        machine.passes(300 * MS, busy_ticks=30)
        assert (watch.is_shared, watch.has_room) == (False, True)
        counts.write_text(f"0 {100 * MS} 1\n")
        machine.passes(300 * MS, busy_ticks=30)
        assert watch.is_contended()


def test_own_threads_that_wait_for_each_other_are_not_contention(machine: Machine, tmp_path: Path) -> None:
    with closing(Contention(tmp_path)) as watch:
        machine.passes(300 * MS, waited_ns=100 * MS, waits=1, busy_ticks=2 // len(os.sched_getaffinity(0)))
        assert not watch.is_contended()
        assert not watch.is_run_contended([watch.read()], MS)
        machine.passes(300 * MS, waited_ns=100 * MS, waits=1, busy_ticks=15)
        assert watch.is_contended()


@pytest.mark.alone
def test_threads_of_a_pool_sleep_before_those_of_another_run() -> None:
    ended: list[bytes] = []
    for count in range(1, 21):
        # releases the lock, and uses a processor for some milliseconds as a waiting thread of a pool does
        threading.Thread(target=lambda: ended.append(sha256(bytes(4 << 20)).digest())).start()
        let_threads_sleep()
        if len(ended) == count:
            return
    pytest.fail("a thread still ran")


def test_other_programs_on_the_real_machine_are_detected() -> None:
    numbers = torch.randn(1 << 18)
    with closing(Contention()) as watch, busy_processors():
        assert any(_sees(watch, numbers) for _ in range(50))


def _sees(watch: Contention, numbers: torch.Tensor) -> bool:
    for _ in range(20):
        numbers.exp().sum()
    return watch.is_contended()


TIMES = st.lists(st.floats(1, 1e9), min_size=2, max_size=60)


def samples_of(times: list[float]) -> Samples:
    samples = Samples({"all": 1.0})
    for time in times:
        samples.add("all", time)
    return samples


@given(TIMES, st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]))
def test_quantiles_of_one_stratum_equal_those_of_numpy(times: list[float], share: float) -> None:
    assert samples_of(times).quantile_us(share) == pytest.approx(np.quantile(times, share) / 1e3)


@given(st.integers(LEAST, 40), st.integers(1, 40))
def test_stratum_is_weighted_by_its_share_and_not_by_its_runs(quick: int, slow: int) -> None:
    samples = Samples({"quick": 0.8, "slow": 0.2})
    for stratum, count, time in (("quick", quick, 1000.0), ("slow", slow, 9000.0)):
        for _ in range(count):
            samples.add(stratum, time)
    assert samples.quantile_us(0.5) == pytest.approx(1.0)
    assert samples.quantile_us(0.99) > 8.0


def test_contended_case_has_the_requested_number_of_runs() -> None:
    samples = samples_of([1.0])
    for time in range(50):
        samples.add_contended("all", float(time))
    samples.settle(Effort(iterations=4))
    assert (len(samples), samples.slowed) == (4, 3)


def test_runs_are_distributed_over_strata_as_calls() -> None:
    samples = Samples({"a": 3.0, "b": 1.0})
    for _ in range(40):
        samples.add(samples.next_stratum, 1.0)
    assert {stratum: len(times) for stratum, times in samples.times.items()} == {"a": 30, "b": 10}


def test_equal_times_are_precise_after_the_fewest_runs() -> None:
    samples = Samples({"all": 1.0})
    effort = Effort(precision=0.01, budget_s=1e6)
    while samples.done(effort) is None:
        samples.add("all", 1000.0)
    assert (samples.done(effort), len(samples)) == ("precision", FEWEST)


def test_long_calls_have_more_runs_within_their_part_of_the_budget() -> None:
    samples, effort = Samples({"all": 1.0}), Effort().of_one(5)
    assert [Effort().of_one(rows).budget_s for rows in (1, 100, 10_000)] == [3.0, 0.75, 0.25]
    while samples.done(effort) is None:
        samples.add("all", 2e7)
    assert (samples.done(effort), len(samples)) == ("precision", FEWEST_LONG)


def test_spread_that_does_not_shrink_has_settled() -> None:
    samples, draw = Samples({"all": 1.0}), np.random.default_rng(0)
    effort = Effort(precision=0.001, budget_s=1e6)
    while samples.done(effort) is None:
        samples.add("all", float(draw.normal(1000, 100)))
    assert samples.done(effort) == "settled"
    assert 0.05 < samples.spread < 0.25


def test_spent_budget_ends_runs_after_at_least_three() -> None:
    samples = Samples({"all": 1.0})
    samples.spent_ns = 10**12
    done = []
    for time in (1.0, 1e6, 1e3):
        done.append(samples.done(Effort()))
        samples.add("all", time)
    assert [*done, samples.done(Effort())] == [None, None, None, "budget"]


def test_percentiles_need_five_effective_runs() -> None:
    samples = Samples({"most": 0.94, "rest": 0.06})
    for stratum in ("rest", "most", "most", "most", "most", "rest", "rest"):
        samples.add(stratum, 1000.0)
    assert samples.effective_runs == 4
    assert (samples.percentile_us(0.1), samples.percentile_us(0.9)) == (None, None)
    samples.add("most", 1000.0)
    assert samples.effective_runs == 5
    assert (samples.percentile_us(0.1), samples.percentile_us(0.9)) == (1.0, 1.0)


def test_median_is_not_the_time_of_a_single_heavy_run() -> None:
    # like a call whose memory was twice in another state than in most calls of the program
    samples = Samples({"most": 0.94, "rest": 0.06})
    for stratum, time in (("rest", 1664.0), ("most", 1086.0), ("rest", 1560.0)):
        samples.add(stratum, time)
    assert samples.quantile_us(0.5) == 1.56
    assert samples.effective_runs == 3


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30).filter(lambda weights: sum(weights) > 0.01))
def test_trimmed_weights_sum_to_one_and_are_at_most_a_third(weights: list[float]) -> None:
    trimmed = trim([weight / sum(weights) for weight in weights])
    assert sum(trimmed) == pytest.approx(1)
    assert max(trimmed) <= max(1 / 3, 1 / len(weights)) + 1e-9


def test_main_stratum_gets_three_runs_beyond_the_budget() -> None:
    effort, samples = Effort(), Samples({"most": 0.94, "rest": 0.06})
    samples.spent_ns = 10**12
    for stratum in ("rest", "most", "rest", "most"):
        samples.add(stratum, 1000.0)
        assert samples.done(effort) is None
    samples.add("most", 1000.0)
    assert samples.done(effort) == "budget"
    # stop trying if the stratum never occurs
    never = Samples({"most": 0.94, "rest": 0.06})
    never.spent_ns = 10**12
    while never.done(effort) is None:
        never.add("rest", 1000.0)
    assert len(never) == 6
