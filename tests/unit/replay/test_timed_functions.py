"""Tests of the order and the memory of compared functions, and of the ratio of their times."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from opgrip.replay.inputs.inputs import Inputs, device_map
from opgrip.replay.results.paired_ratio import EQUAL, FASTER, SLOWER, UNDECIDED, _joined_chance, paired_ratio
from opgrip.replay.timing.stopwatch import Stopwatch
from opgrip.replay.timing.timed_functions import InputSet, Run, TimedCase, TimedFunction, paired_runs
from opgrip.replay.timing.timing_options import DISCRETE
from opgrip.traces.schema.arguments import TensorSpec

ROUNDS = 96


def timed_function_of(number: int = 0, sets: int = 1, **rest: Any) -> TimedFunction:
    spec = TensorSpec((4,), (1,), torch.float32, "cpu")
    all_inputs = [Inputs((spec,), {}, {}, device_map("cpu", None), 0) for _ in range(sets)]
    for inputs in all_inputs:
        inputs.keep()
    options = {"mutates": False, "fresh": None, "result_bytes": 0} | rest
    return TimedFunction(number, "tested", "eager", torch.sin, [InputSet([item]) for item in all_inputs], **options)


@given(st.integers(1, 4), st.integers(0, 99))
def test_each_function_runs_in_each_memory_before_and_after_each_other(count: int, seed: int) -> None:
    functions = [timed_function_of(exchanges="alike") for _ in range(count)]
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
    functions = [timed_function_of(exchanges=kind) for kind in ("forward", "backward", None, None)]
    own = [function.input_sets for function in functions]
    case = TimedCase(functions)
    for number in range(4):
        case.next_round(Random(0))
        assert all(function.input_sets is kept for function, kept in zip(functions, own, strict=True))
        assert {function.round for function in functions} == {number}


def test_memory_of_a_failed_function_is_released_and_the_others_go_on() -> None:
    functions = [timed_function_of(exchanges="alike") for _ in range(3)]
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
    functions = [timed_function_of(exchanges="alike") for _ in range(2)]
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
    functions = [timed_function_of(sets=3, exchanges="alike") for _ in range(2)]
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
    function = timed_function_of(mutates=True)
    function.function = lambda x: (values.append(x.tolist()), x.add_(1))
    watch = Stopwatch(DISCRETE, lambda: None, 0.0)
    for _ in range(3):
        function.time(watch, lambda: function.run_before(Random(0)))
    assert values == [values[0]] * 3
