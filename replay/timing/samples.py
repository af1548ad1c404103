"""Times of a case's runs, and the criteria for when there are enough of them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from math import fsum

import numpy as np

from opgrip.replay.timing.timing_options import Effort

FEWEST = 10  # minimum number of runs of a case, unless its budget is too short
# duration in ns from which a call is long, and minimum number of its runs: a few seconds of a shared machine say little
LONG_RUN_NS, FEWEST_LONG = 10_000_000, 30
LEAST = 3  # minimum number of runs of a case in any event
# share of the program's calls above which a stratum (runs with the same values and memory) needs `LEAST` runs
MAIN = 0.5
MOST_CONTENDED = 100  # number of contended runs after which no more runs are tried
FEWEST_FOR_PERCENTILES = 5  # effective number of runs that is needed for percentiles other than the median
LOOK = 5  # number of runs between checks of the spread
# number of checks, and maximum relative change between them, after which a spread counts as settled
SETTLED, STEADY = 6, 0.1
# number of runs that is enough if the work between them takes this many times longer than the runs
ENOUGH, DEAR = 20, 10


class Samples:
    """Times of runs, grouped into strata: runs with the same input values and memory state.

    shares : share of the program's calls that each stratum represents; 0 for strata that occur only in the replay
    in_order : times of the runs in ns, in the order of the runs; contended runs that count come last
    contended : (stratum, time) of runs during which other processes used the cores; they only count if `is_contended`
    """

    def __init__(self, shares: Mapping[Hashable, float], alike: bool = False, fewest: int = FEWEST) -> None:
        self._alike = alike
        self._fewest = fewest
        total = sum(shares.values())
        self.shares = {stratum: share / total for stratum, share in shares.items()}
        self.times: dict[Hashable, list[float]] = {stratum: [] for stratum in shares}
        self.in_order: list[float] = []
        self._strata_in_order: list[Hashable] = []
        self.dropped = 0
        self.slowed = 0
        self.contended: list[tuple[Hashable, float]] = []
        self.is_contended = False
        self._given_up = 0
        self.spent_ns = 0
        self._spreads: list[float] = []
        self._memory_rates: list[float] = []

    def __len__(self) -> int:
        return sum(map(len, self.times.values()))

    def add_memory_rate(self, gb_per_s: float) -> None:
        self._memory_rates.append(gb_per_s)

    @property
    def memory_gb_per_s(self) -> float | None:
        """Mean rate in GB/s at which this thread could read memory between the runs."""
        return fsum(self._memory_rates) / len(self._memory_rates) if self._memory_rates else None

    @property
    def next_stratum(self) -> Hashable:
        strata = (stratum for stratum, share in self.shares.items() if share)
        return min(strata, key=lambda stratum: (len(self.times[stratum]) + 0.5) / self.shares[stratum])

    def add(self, stratum: Hashable, time_ns: float) -> None:
        self.times.setdefault(stratum, []).append(time_ns)
        self.in_order.append(time_ns)
        self._strata_in_order.append(stratum)
        self.shares.setdefault(stratum, 0.0)
        if len(self) % LOOK == 0:
            self._spreads.append(self.spread)

    def add_contended(self, stratum: Hashable, time_ns: float) -> None:
        self.contended.append((stratum, time_ns))

    def try_again(self) -> None:
        self.spent_ns = 0
        self._given_up = len(self.contended)

    def settle(self, effort: Effort) -> None:
        self.is_contended = self.lacks_quiet_runs(effort)
        if self.is_contended:
            most = MOST_CONTENDED if effort.iterations is None else effort.iterations - len(self)
            for stratum, time_ns in self.contended[-most:]:
                self.add(stratum, time_ns)
                self.slowed += 1
        else:
            self.dropped += len(self.contended)
        self.contended.clear()

    def lacks_quiet_runs(self, effort: Effort) -> bool:
        least = LEAST if effort.iterations is None else min(LEAST, effort.iterations)
        return bool(self.contended) and len(self) < least

    def quantile_us(self, share: float) -> float:
        """Return the time in us within which the given share of the program's calls ends (0.5 for the median)."""
        strata = self._select_strata()
        if len(strata) == 1 and len(self.times[strata[0]]) >= LEAST and not self._alike:
            return float(np.quantile(self.times[strata[0]], share)) / 1e3
        return quantile(self.in_order, self.weights, share) / 1e3

    def percentile_us(self, share: float) -> float | None:
        return self.quantile_us(share) if self.effective_runs >= FEWEST_FOR_PERCENTILES else None

    @property
    def weights(self) -> list[float] | None:
        """Share of the program's calls that each run represents, in order; None if all are equal."""
        strata = self._select_strata()
        if self._alike or len(self.times) == 1:
            return None
        weight_of = {stratum: (self.shares[stratum] or 1.0) / len(self.times[stratum]) for stratum in strata}
        total = sum((self.shares[stratum] or 1.0) for stratum in strata)
        return trim([weight_of.get(stratum, 0.0) / total for stratum in self._strata_in_order])

    @property
    def kinds(self) -> list[int] | None:
        numbers = {stratum: number for number, stratum in enumerate(self.times)}
        return [numbers[stratum] for stratum in self._strata_in_order] if len(numbers) > 1 else None

    @property
    def effective_runs(self) -> int:
        return effective_runs(self.weights or [1.0] * len(self))

    def median_us_of(self, input_set: int) -> float | None:
        strata = [stratum for stratum in self.times if isinstance(stratum, tuple) and stratum[0] == input_set]
        times = [time for stratum in strata for time in self.times[stratum]]
        return float(np.median(times)) / 1e3 if times else None

    @property
    def mean_us(self) -> float:
        return float(np.average(self.in_order, weights=self.weights)) / 1e3

    @property
    def spread(self) -> float:
        strata = [stratum for stratum in self._select_strata() if len(self.times[stratum]) > 1]
        if not strata:
            return float("inf")
        quartiles = np.array([np.quantile(self.times[stratum], (0.25, 0.5, 0.75)) for stratum in strata])
        weights = np.array([self.shares[stratum] or 1e-9 for stratum in strata])
        middle = float(weights @ quartiles[:, 1])
        return float(weights @ (quartiles[:, 2] - quartiles[:, 0])) / middle if middle else 0.0

    def done(self, effort: Effort) -> str | None:
        """Return the reason why no more runs are needed, or None if another run is needed."""
        is_spent = self.spent_ns >= effort.budget_s * 1e9
        if effort.iterations is not None:
            if len(self) >= effort.iterations:
                return "iterations"
        elif len(self) >= LEAST:
            fewest = max(self._fewest, FEWEST_LONG if fsum(self.in_order) >= LONG_RUN_NS * len(self) else 0)
            if len(self) >= fewest and self._spreads and not self._lacks_main:
                if self._spreads[-1] <= effort.precision:
                    return "precision"
                last = self._spreads[-SETTLED:]
                if len(last) == SETTLED and max(last) - min(last) <= STEADY * max(last):
                    return "settled"
                if len(self) >= max(fewest, ENOUGH) and self.spent_ns >= DEAR * fsum(self.in_order):
                    return "most"
            # a run may be in another memory state than requested
            if is_spent and (not self._lacks_main or len(self) >= 2 * LEAST):
                return "budget"
        contended = len(self.contended) - self._given_up
        if effort.iterations is None:
            gives_up = contended >= MOST_CONTENDED or (is_spent and len(self) + contended >= LEAST)
        else:
            gives_up = is_spent and contended >= max(effort.iterations, FEWEST)
        if contended and gives_up:
            return "contended"
        return None

    @property
    def _lacks_main(self) -> bool:
        return any(share > MAIN and len(self.times[stratum]) < LEAST for stratum, share in self.shares.items())

    def _select_strata(self) -> list[Hashable]:
        timed_strata = [stratum for stratum, times in self.times.items() if times]
        return [stratum for stratum in timed_strata if self.shares[stratum]] or timed_strata


def trim(weights: Sequence[float]) -> list[float]:
    trimmed, count = list(weights), len(weights)
    limit = max(1 / LEAST, 1 / count) if count else 1.0
    while count > 1 and (above := fsum(max(weight - limit, 0.0) for weight in trimmed)) > 1e-12:
        below = sum(weight < limit for weight in trimmed)
        trimmed = [min(weight, limit) + (above / below if weight < limit else 0.0) for weight in trimmed]
    return trimmed


def quantile(times: Sequence[float], weights: Sequence[float] | None, share: float) -> float:
    if weights is None:
        return float(np.quantile(times, share))
    all_times, all_weights = np.asarray(times, dtype=np.float64), np.asarray(weights, dtype=np.float64)
    order = np.argsort(all_times, kind="stable")
    place = int(np.searchsorted(np.cumsum(all_weights[order]) / all_weights.sum(), share - 1e-9))
    return float(all_times[order][min(place, len(order) - 1)])


def effective_runs(weights: Sequence[float]) -> int:
    """Return Kish's effective number of runs with these weights w: (sum w)^2 / sum w^2, rounded down."""
    squares = fsum(weight * weight for weight in weights)
    # the summand corrects rounding: n weights of 1/n result in slightly less than n
    return int(fsum(weights) ** 2 / squares + 1e-9) if squares > 0 else 0
