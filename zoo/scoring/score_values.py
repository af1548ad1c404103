"""Values of scores: of a trace, of a model, and of all models in one variant."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import exp, fsum, log

from opgrip.replay.results.origins import Origin
from opgrip.zoo.scoring.case_times import Measured
from opgrip.zoo.scoring.spread import Uncertainty, of_mean

CHARGE = 2.0
"""cost of a case that is not ok, as a multiple of its baseline time, or of its expected time here if that is longer"""
WHOLE = 0.95
"""share of the baseline's time that must be supported; a score below it is partial"""
UTMOST = 1e9
"""maximum plausible speed ratio; its inverse is the minimum"""
Z = 1.96
"""number of standard deviations around the mean that contain 95 % of a normal distribution"""


@dataclass(frozen=True, slots=True)
class TraceScore:
    """One trace compared with its baseline.

    Attributes
    ----------
    statuses : number of rows by status
    slowed : number of contended rows
    time_us : predicted time here: all calls of the cases that are ok, including cases that the baseline lacks
    compared : number of cases that are ok here and in the baseline
    base_us : the baseline's time of all selected cases that it contains
    ok_base_us : the baseline's time of the selected cases that are also ok here
    ok_us : time here of the cases that are ok here and in the baseline
    whole_us : the baseline's time of all its cases
    left_out_us : the baseline's time of selected cases that are left out, see `is_left_out`
    pace : speed on other traces, used for a trace without any ok case
    uncertainty : uncertainty of the logarithm of the score
    problem : reason why the trace was not replayed or compared, or empty
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
        """Return the share of the selected baseline time whose cases are ok here."""
        return self.ok_base_us / self.base_us if self.base_us else None

    @property
    def speed(self) -> float | None:
        """Return the ratio of the baseline's time to the time here, over cases that are ok here and in the baseline."""
        return _credible(self.ok_base_us, self.ok_us)

    @property
    def selected(self) -> float | None:
        """Return the share of the baseline's total time that the selected cases account for."""
        return (self.base_us + self.left_out_us) / self.whole_us if self.whole_us and self.statuses else None

    @property
    def left_out(self) -> float:
        """Return the share of the selected baseline time that is left out."""
        return self.left_out_us / (self.base_us + self.left_out_us) if self.left_out_us else 0.0

    @property
    def score(self) -> float | None:
        """Return the ratio of the baseline's time to the time here, including a cost for cases that are not ok.

        The result is None if no case of the baseline was run, or if this cost is unknown.
        """
        speed = self.speed or self.pace
        if speed is None or not self.base_us or not self.statuses:
            return None
        missing_us = self.base_us - self.ok_base_us
        return _credible(self.base_us, self.ok_us + CHARGE * missing_us * max(1.0, 1 / speed))


@dataclass(frozen=True, slots=True)
class ModelScore:
    """A model; its score is the geometric mean over its runs.

    Attributes
    ----------
    weight : weight in the total; the weights of all models with a score sum to 1
    """

    model: str
    library: str
    family: str
    traces: Sequence[TraceScore]
    weight: float = 0.0

    @property
    def scored(self) -> list[TraceScore]:
        """Return the traces that have a score."""
        return [trace for trace in self.traces if trace.score is not None]

    @property
    def statuses(self) -> Counter[str]:
        """Return the number of rows by status."""
        return sum((trace.statuses for trace in self.traces), Counter())

    @property
    def score(self) -> float | None:
        """Return the score, or None if no run has one."""
        return _geometric((trace.score or 0.0, 1.0) for trace in self.scored)

    @property
    def speed(self) -> float | None:
        """Return the geometric mean of the runs' speed ratios, over cases that are ok here and in the baseline."""
        return _geometric((trace.speed, 1.0) for trace in self.scored if trace.speed)

    @property
    def selected(self) -> float | None:
        """Return the mean over the replayed runs of the share of the baseline's time that was selected."""
        shares = [trace.selected for trace in self.traces if trace.selected is not None]
        return fsum(shares) / len(shares) if shares else None

    @property
    def left_out(self) -> float:
        """Return the mean share of the baseline's time that is left out, over the replayed runs."""
        shares = [trace.left_out for trace in self.traces if trace.selected is not None]
        return fsum(shares) / len(shares) if shares else 0.0

    @property
    def supported(self) -> float | None:
        """Return the mean share of the selected baseline time whose cases are ok here, or None without baseline times.

        The mean is over the runs that the baseline contains; a run that was not replayed counts as 0.
        """
        shares = [trace.supported if trace.statuses else 0.0 for trace in self.traces if trace.whole_us]
        known = [share for share in shares if share is not None]
        return fsum(known) / len(known) if known else None

    @property
    def uncertainty(self) -> Uncertainty:
        """Return the uncertainty of the logarithm of the score."""
        scored = self.scored
        return of_mean((1 / len(scored), trace.uncertainty) for trace in scored)

    @property
    def is_partial(self) -> bool:
        """Return True if the supported share is below `WHOLE`."""
        return (self.supported or 0.0) < WHOLE


@dataclass(frozen=True, slots=True)
class Score:
    """The score of all models in one variant.

    Attributes
    ----------
    measured : variant, machine and trace
    baseline : machine of the baseline; empty without baseline times
    interval : 95 % confidence interval of the score over similar models; None for a single model
    of_traces : number of traces in the baseline
    slowed : share of contended rows
    unmatched : number of requested traces of the baseline in which no case was selected
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
        """Return the variant in words."""
        return self.measured.way

    @property
    def scored(self) -> list[ModelScore]:
        """Return the models that have a score."""
        return [model for model in self.models if model.score is not None]

    @property
    def score(self) -> float | None:
        """Return the weighted geometric mean of the models' scores, or None if no model has a score."""
        return _geometric((model.score or 0.0, model.weight) for model in self.scored)

    @property
    def speed(self) -> float | None:
        """Return the models' weighted geometric mean speed ratio, over cases that are ok here and in the baseline."""
        return _geometric((model.speed, model.weight) for model in self.scored if model.speed)

    @property
    def selected(self) -> float | None:
        """Return the weighted mean over models of the share of the baseline's time that was selected."""
        return _mean_share((model, model.selected) for model in self.models)

    @property
    def covered(self) -> float | None:
        """Return the mean over the requested traces of the share of the baseline's time that was selected.

        The result is None without baseline times. A trace that was not replayed, or has no selected case, counts as 0.
        """
        known = [model for model in self.models if any(trace.whole_us for trace in model.traces)]
        share = _mean_share((model, model.selected or 0.0) for model in known)
        traces = sum(len(model.traces) for model in known)
        return None if share is None else share * traces / (traces + self.unmatched)

    @property
    def left_out(self) -> float:
        """Return the weighted mean over models of the share of the baseline's time that is left out."""
        return _mean_share((model, model.left_out) for model in self.models if model.selected is not None) or 0.0

    @property
    def supported(self) -> float | None:
        """Return the weighted mean over models of the supported share; models that did not run count as 0."""
        return _mean_share((model, model.supported) for model in self.models)

    @property
    def deviation(self) -> float:
        """Return the standard deviation of the logarithm of the score between replays on the same machine."""
        return of_mean((model.weight, model.uncertainty) for model in self.scored).deviation

    @property
    def traces(self) -> int:
        """Return the number of traces that have a score."""
        return sum(len(model.scored) for model in self.models)

    @property
    def is_partial(self) -> bool:
        """Return True if the supported share is below `WHOLE`, or if a model of the baseline has no score."""
        return (self.supported or 0.0) < WHOLE or any(
            model.score is None and any(trace.whole_us for trace in model.traces) for model in self.models
        )


def _mean_share(shares: Iterable[tuple[ModelScore, float | None]]) -> float | None:
    """Return the weighted mean of the known shares, or None if no share is known."""
    known = [(model, share) for model, share in shares if share is not None]
    weights = weights_of([model for model, _ in known])
    return fsum(weight * share for (_, weight), (_, share) in zip(weights, known, strict=True)) if known else None


def weights_of(models: Sequence[ModelScore]) -> list[tuple[ModelScore, float]]:
    """Return each model with its weight: all families have the same weight, which their models share equally."""
    members = Counter(_family(model) for model in models)
    return [(model, 1 / len(members) / members[_family(model)]) for model in models]


def _family(model: ModelScore) -> tuple[str, str]:
    """Return the family of a model; a model without one is a separate family."""
    return (model.library, model.family) if model.family else ("", model.model)


def _credible(base_us: float, here_us: float) -> float | None:
    """Return the speed ratio, or None if a time is missing or the ratio is implausible."""
    if not (base_us > 0 and here_us > 0):
        return None
    ratio = base_us / here_us
    return ratio if 1 / UTMOST < ratio < UTMOST else None


def _geometric(values: Iterable[tuple[float, float]]) -> float | None:
    """Return the weighted geometric mean, or None without values."""
    pairs = list(values)
    total = fsum(weight for _, weight in pairs)
    return exp(fsum(weight * log(value) for value, weight in pairs) / total) if total else None
