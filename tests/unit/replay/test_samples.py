"""Statistics of times: quantiles weighted by shares of the program's calls, and when there are enough times."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opgrip.replay.timing.samples import FEWEST, FEWEST_LONG, LEAST, Samples, trim
from opgrip.replay.timing.timing_options import Effort

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
