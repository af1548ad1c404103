"""The score: how many times as fast as a baseline a device or compiler runs real models.

docs/benchmark.md describes the rules; each step is a function here.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp, fsum, log

from opgrip.cli.command import counted
from opgrip.errors import UserError
from opgrip.replay.outcome import Results
from opgrip.replay.results.origins import Origin, origin_in, origin_of
from opgrip.replay.results.results import CONTENDED, OK, SKIPPED, WRONG, Result
from opgrip.zoo.scoring.baselines import (
    Baseline,
    BaselineCase,
    BaselineTrace,
    is_of_program,
    is_time,
    keyed,
    unusual_in,
)
from opgrip.zoo.scoring.case_times import Measured, measured_of, way_of
from opgrip.zoo.scoring.spread import Uncertainty, deviation_of, interval_of, of_mean, of_ratio, of_sum

CHARGE = 2.0
"""cost of a case that is not ok, as a multiple of its baseline time, or of its expected time here if that is longer"""
WHOLE = 0.95
"""share of the baseline's time that must be supported; a score below it is partial"""
MOST_SCORES = 20_000
"""maximum number of trace scores, over all variants"""
UTMOST = 1e9
"""limit of a plausible speed ratio, in both directions"""
Z = 1.96
"""standard deviations around the mean that contain 95 % of a normal distribution"""


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
    ok_us : time here of the cases that are ok in both
    whole_us : the baseline's time of all its cases
    pace : speed on other traces, used for a trace without any ok case
    uncertainty : uncertainty of the logarithm of the score
    problem : why the trace was not replayed or compared; empty otherwise
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
    pace: float | None = None
    uncertainty: Uncertainty = field(default_factory=Uncertainty)
    problem: str = ""

    @property
    def supported(self) -> float | None:
        """Return the share of the selected baseline time whose cases are ok here."""
        return self.ok_base_us / self.base_us if self.base_us else None

    @property
    def speed(self) -> float | None:
        """Return the ratio of the baseline's time to the time here, over the cases that are ok in both."""
        return _credible(self.ok_base_us, self.ok_us)

    @property
    def selected(self) -> float | None:
        """Return the share of the baseline's time whose cases were selected here."""
        return self.base_us / self.whole_us if self.whole_us and self.statuses else None

    @property
    def score(self) -> float | None:
        """Return the ratio of the baseline's time to the time here, charging for cases that are not ok.

        The result is None if no case of the baseline was run, or without a pace to charge by.
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
        """Return the speed over the cases that are ok in both."""
        return _geometric((trace.speed, 1.0) for trace in self.scored if trace.speed)

    @property
    def selected(self) -> float | None:
        """Return the mean selected share over the replayed runs."""
        shares = [trace.selected for trace in self.traces if trace.selected is not None]
        return fsum(shares) / len(shares) if shares else None

    @property
    def supported(self) -> float | None:
        """Return the mean supported share over the runs that the baseline contains, or None if it contains none.

        A run that was not replayed counts as 0.
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
        """Return True if too small a share is supported."""
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
    """

    measured: Measured
    models: Sequence[ModelScore]
    baseline: str = ""
    interval: tuple[float, float] | None = None
    of_traces: int = 0
    slowed: float = 0.0

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
        """Return the weighted geometric mean over models, or None if no model has a score."""
        return _geometric((model.score or 0.0, model.weight) for model in self.scored)

    @property
    def speed(self) -> float | None:
        """Return the weighted geometric mean over models, counting only cases that are ok in both."""
        return _geometric((model.speed, model.weight) for model in self.scored if model.speed)

    @property
    def selected(self) -> float | None:
        """Return the weighted mean over models of the share of the baseline's time that was selected."""
        weights = weights_of([model for model in self.models if model.selected is not None])
        return fsum(weight * (model.selected or 0.0) for model, weight in weights) if weights else None

    @property
    def supported(self) -> float | None:
        """Return the weighted mean over models of the supported share; models that did not run count as 0."""
        weights = weights_of([model for model in self.models if model.supported is not None])
        return fsum(weight * (model.supported or 0.0) for model, weight in weights) if weights else None

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
        """Return True if too small a share is supported, or if a model of the baseline has no score."""
        return (self.supported or 0.0) < WHOLE or any(
            model.score is None and any(trace.whole_us for trace in model.traces) for model in self.models
        )


def score_of(results: Results, baseline: Baseline) -> list[Score]:
    """Return the score of each variant, in the order of the rows."""
    unusual = unusual_in(results)
    rows_of: dict[str, dict[str, list[Result]]] = defaultdict(lambda: defaultdict(list))
    origins: dict[str, Origin] = {}
    for row in results:
        if is_counted(row):
            rows_of[way_of(row, unusual)][row.trace].append(row)
            origins.setdefault(row.trace, origin_of(row))
    problems = {**dict(_other_recordings(results, baseline, origins)), **dict(_problems(results))}
    origins |= {name: origin for name, (origin, _) in problems.items() if name not in origins}
    why = {name: problem for name, (_, problem) in problems.items()}
    check_ways(len(rows_of), len(origins))
    return [_score(results, way, rows, origins, why, baseline) for way, rows in rows_of.items()]


def check_ways(ways: int, traces: int) -> None:
    """Raise `UserError` if scoring would take minutes, as for untrusted results with too many variants."""
    if ways * traces > MOST_SCORES:
        problem = f"{counted(ways, 'run configuration')} for {counted(traces, 'trace')} are too many to score"
        raise UserError(problem, "score fewer traces or modes")


def is_counted(row: Result) -> bool:
    """Return True if a row enters a score: forward, with the recorded batch, one at a time, and from a named trace."""
    return bool(row.trace) and is_of_program(row)


def _problems(results: Results) -> Iterable[tuple[str, tuple[Origin, str]]]:
    """Yield the traces that were not replayed, and why, from the header."""
    traces = results.header.get("traces")
    for name, about in traces.items() if isinstance(traces, Mapping) else ():
        if isinstance(about, Mapping) and about.get("problem"):
            yield str(name), (origin_in(str(name), about), str(about["problem"]))


def _other_recordings(
    results: Results, baseline: Baseline, origins: Mapping[str, Origin]
) -> Iterator[tuple[str, tuple[Origin, str]]]:
    """Yield the traces whose baseline comes from another file, since its numbers of calls may differ."""
    traces = results.header.get("traces")
    for name, about in traces.items() if isinstance(traces, Mapping) else ():
        base = baseline.traces.get(name)
        own = about.get("trace_hash") if isinstance(about, Mapping) else None
        if base is not None and own and base.trace_hash and own != base.trace_hash and name in origins:
            yield name, (origins[name], "its baseline belongs to another recording")


def _score(
    results: Results,
    way: str,
    rows_of: Mapping[str, Sequence[Result]],
    origins: Mapping[str, Origin],
    problems: Mapping[str, str],
    baseline: Baseline,
) -> Score:
    traces = [
        score_trace(origin, rows_of.get(name, ()), baseline.traces.get(name), problems.get(name, ""))
        for name, origin in origins.items()
    ]
    every = [row for rows in rows_of.values() for row in rows]
    measured = measured_of(results, way, every)
    return score_traces(measured, traces, baseline.machine if baseline.traces else "", len(baseline.traces), every)


def score_traces(
    measured: Measured, traces: Iterable[TraceScore], baseline: str, of_traces: int, rows: Collection[Result]
) -> Score:
    """Return the score of a set of scored traces; `of_traces` is the number that the baseline has."""
    models = _models_of(traces)
    # charge a model that cannot run at all as if it were as fast as the others
    pace = Score(measured, _weighed(models)).speed
    models = _weighed([replace(item, traces=[replace(trace, pace=pace) for trace in item.traces]) for item in models])
    interval = interval_of([(log(item.score), item.weight) for item in models if item.score])
    slowed = sum(row.is_slowed for row in rows) / max(len(rows), 1)
    return Score(measured, models, baseline, interval, of_traces, slowed)


def _models_of(traces: Iterable[TraceScore]) -> list[ModelScore]:
    by_model: dict[str, list[TraceScore]] = defaultdict(list)
    for trace in traces:
        by_model[trace.origin.model].append(trace)
    return [ModelScore(name, own[0].origin.library, own[0].origin.family, own) for name, own in by_model.items()]


def _weighed(models: Sequence[ModelScore]) -> list[ModelScore]:
    """Return the models with their weights in the total."""
    weights = {model.model: weight for model, weight in weights_of([item for item in models if item.score])}
    return [replace(item, weight=weights.get(item.model, 0.0)) for item in models]


def score_trace(origin: Origin, rows: Sequence[Result], base: BaselineTrace | None, problem: str = "") -> TraceScore:
    """Return the score of one trace, compared with its baseline.

    Parameters
    ----------
    rows : rows of the trace in one variant
    base : times in the baseline; None if it lacks the trace
    """
    statuses, slowed = Counter(row.status for row in rows), sum(row.is_slowed for row in rows)
    timed = [row for row in rows if row.status == OK and is_time(row.median_us)]
    time_us = fsum(max(row.count, 1) * (row.median_us or 0.0) for row in timed)
    if not rows or base is None:
        why = problem or ("no baseline" if rows else "not replayed")
        return TraceScore(
            origin, statuses, slowed, time_us, whole_us=0.0 if base is None else base.total_us, problem=why
        )
    # leave out cases that say nothing about this machine: they fail in the program too, have no time in the baseline,
    # or were contended
    run = [row for row in rows if row.status not in (SKIPPED, CONTENDED)]
    joined = [(row, base.cases[key]) for key, row in keyed(run) if key in base.cases]
    pairs = [(row, case) for row, case in joined if case.median_us is not None]
    ok = [(row, case) for row, case in pairs if row.status == OK and is_time(row.median_us)]
    return TraceScore(
        origin,
        statuses,
        slowed,
        time_us,
        len(ok),
        base_us=fsum(case.total_us for _, case in pairs),
        ok_base_us=fsum(case.total_us for _, case in ok),
        ok_us=fsum(case.count * (row.median_us or 0.0) for row, case in ok),
        whole_us=base.total_us,
        uncertainty=_uncertainty(origin.trace, ok),
        problem=problem or ("" if pairs else "the baseline has other cases"),
    )


def _uncertainty(trace: str, pairs: Sequence[tuple[Result, BaselineCase]]) -> Uncertainty:
    here = of_sum(
        ((trace, place), case.count * (row.median_us or 0.0), row.median_us or 0.0, deviation_of(row))
        for place, (row, case) in enumerate(pairs)
    )
    there = of_sum(
        ((trace, ~place), case.total_us, case.median_us or 0.0, case.deviation) for place, (_, case) in enumerate(pairs)
    )
    return of_ratio(here, there)


def weights_of(models: Sequence[ModelScore]) -> list[tuple[ModelScore, float]]:
    """Return each model with its weight: equal for all families, and shared equally within a family."""
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


def wrong_and_not_run(statuses: Counter[str]) -> tuple[int, int]:
    """Return the number of rows with wrong results, and of rows without a result."""
    not_run = sum(count for status, count in statuses.items() if status not in (OK, WRONG, SKIPPED, CONTENDED))
    return statuses[WRONG], not_run
