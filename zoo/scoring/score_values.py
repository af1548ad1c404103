"""Scores of traces and models, and of all models together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import exp, fsum, log

from opgrip.replay.results.origins import Origin
from opgrip.zoo.scoring.baselines import Measured, Uncertainty, of_mean

CHARGE = 2.0  # cost of a case that is not ok, times its time in the baseline, or its expected time if that is longer
WHOLE = 0.95  # share of the baseline's time that must be supported; a score below it is partial
UTMOST = 1e9  # maximum plausible speed ratio; its inverse is the minimum


@dataclass(frozen=True, slots=True)
class TraceScore:
    """Times of one trace in the scored replay and in the baseline.

    ok_base_us, ok_us : times of the cases that are ok in both: in the baseline, and in the replay
    whole_us : time of all cases in the baseline
    left_out_us : time in the baseline of replayed cases that do not count, see `is_left_out`
    pace : speed on other traces, used if no case of this trace is ok
    """

    origin: Origin
    statuses: Counter[str] = field(default_factory=Counter)
    slowed: int = 0
    time_us: float = 0.0
    compared: int = 0
    base_us: float = 0.0
    ok_base_us: float = 0.0
    ok_us: float = 0.0
    whole_us: float = 0.0
    left_out_us: float = 0.0
    pace: float | None = None
    uncertainty: Uncertainty = field(default_factory=Uncertainty)
    problem: str = ""

    @property
    def supported(self) -> float | None:
        """Share of the replayed cases that are ok, weighted by their time in the baseline."""
        return self.ok_base_us / self.base_us if self.base_us else None

    @property
    def speed(self) -> float | None:
        """The baseline's time divided by the replay's time, over the cases that are ok in both."""
        return _credible(self.ok_base_us, self.ok_us)

    @property
    def selected(self) -> float | None:
        return (self.base_us + self.left_out_us) / self.whole_us if self.whole_us and self.statuses else None

    @property
    def left_out(self) -> float:
        return self.left_out_us / (self.base_us + self.left_out_us) if self.left_out_us else 0.0

    @property
    def score(self) -> float | None:
        """The baseline's time divided by the replay's time, with a penalty for each case that is not ok."""
        speed = self.speed or self.pace
        if speed is None or not self.base_us or not self.statuses:
            return None
        missing_us = self.base_us - self.ok_base_us
        return _credible(self.base_us, self.ok_us + CHARGE * missing_us * max(1.0, 1 / speed))


@dataclass(frozen=True, slots=True)
class ModelScore:
    model: str
    library: str
    family: str
    traces: Sequence[TraceScore]
    weight: float = 0.0

    @property
    def scored(self) -> list[TraceScore]:
        return [trace for trace in self.traces if trace.score is not None]

    @property
    def statuses(self) -> Counter[str]:
        return sum((trace.statuses for trace in self.traces), Counter())

    @property
    def score(self) -> float | None:
        return _geometric((trace.score or 0.0, 1.0) for trace in self.scored)

    @property
    def speed(self) -> float | None:
        return _geometric((trace.speed, 1.0) for trace in self.scored if trace.speed)

    @property
    def selected(self) -> float | None:
        shares = [trace.selected for trace in self.traces if trace.selected is not None]
        return fsum(shares) / len(shares) if shares else None

    @property
    def left_out(self) -> float:
        shares = [trace.left_out for trace in self.traces if trace.selected is not None]
        return fsum(shares) / len(shares) if shares else 0.0

    @property
    def supported(self) -> float | None:
        shares = [trace.supported if trace.statuses else 0.0 for trace in self.traces if trace.whole_us]
        values = [share for share in shares if share is not None]
        return fsum(values) / len(values) if values else None

    @property
    def uncertainty(self) -> Uncertainty:
        scored = self.scored
        return of_mean((1 / len(scored), trace.uncertainty) for trace in scored)

    @property
    def is_partial(self) -> bool:
        return (self.supported or 0.0) < WHOLE


@dataclass(frozen=True, slots=True)
class Score:
    """The score of all models in one run configuration.

    interval : 95 % confidence interval of the score
    """

    measured: Measured
    models: Sequence[ModelScore]
    baseline: str = ""
    interval: tuple[float, float] | None = None
    of_traces: int = 0
    slowed: float = 0.0
    unmatched: int = 0

    @property
    def way(self) -> str:
        return self.measured.way

    @property
    def scored(self) -> list[ModelScore]:
        return [model for model in self.models if model.score is not None]

    @property
    def score(self) -> float | None:
        return _geometric((model.score or 0.0, model.weight) for model in self.scored)

    @property
    def speed(self) -> float | None:
        return _geometric((model.speed, model.weight) for model in self.scored if model.speed)

    @property
    def selected(self) -> float | None:
        return _mean_share((model, model.selected) for model in self.models)

    @property
    def covered(self) -> float | None:
        """Share of the baseline's time that belongs to replayed cases; a trace that was not replayed counts as 0."""
        timed_models = [model for model in self.models if any(trace.whole_us for trace in model.traces)]
        share = _mean_share((model, model.selected or 0.0) for model in timed_models)
        traces = sum(len(model.traces) for model in timed_models)
        return None if share is None else share * traces / (traces + self.unmatched)

    @property
    def left_out(self) -> float:
        return _mean_share((model, model.left_out) for model in self.models if model.selected is not None) or 0.0

    @property
    def supported(self) -> float | None:
        return _mean_share((model, model.supported) for model in self.models)

    @property
    def deviation(self) -> float:
        """Standard deviation of the score's logarithm between replays on the same machine."""
        return of_mean((model.weight, model.uncertainty) for model in self.scored).deviation

    @property
    def traces(self) -> int:
        return sum(len(model.scored) for model in self.models)

    @property
    def is_partial(self) -> bool:
        return (self.supported or 0.0) < WHOLE or any(
            model.score is None and any(trace.whole_us for trace in model.traces) for model in self.models
        )


def _mean_share(shares: Iterable[tuple[ModelScore, float | None]]) -> float | None:
    pairs = [(model, share) for model, share in shares if share is not None]
    weights = weights_of([model for model, _ in pairs])
    return fsum(weight * share for (_, weight), (_, share) in zip(weights, pairs, strict=True)) if pairs else None


def weights_of(models: Sequence[ModelScore]) -> list[tuple[ModelScore, float]]:
    """Return each model with its weight: families have equal weights, which their models share equally."""
    members = Counter(_family(model) for model in models)
    return [(model, 1 / len(members) / members[_family(model)]) for model in models]


def _family(model: ModelScore) -> tuple[str, str]:
    return (model.library, model.family) if model.family else ("", model.model)


def _credible(base_us: float, here_us: float) -> float | None:
    if not (base_us > 0 and here_us > 0):
        return None
    ratio = base_us / here_us
    return ratio if 1 / UTMOST < ratio < UTMOST else None


def _geometric(values: Iterable[tuple[float, float]]) -> float | None:
    pairs = list(values)
    total = fsum(weight for _, weight in pairs)
    return exp(fsum(weight * log(value) for value, weight in pairs) / total) if total else None
