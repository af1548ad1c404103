"""What the few cases that stand for many models say of each: its time, and the score."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import fsum, isfinite, sqrt
from statistics import median
from typing import IO, Any

from opgrip.replay.arguments.values import RECORDED
from opgrip.replay.comparing.priors import SHORT_US, USUAL
from opgrip.replay.measuring.origins import Origin, origin_in
from opgrip.replay.measuring.results import OK, SKIPPED, Result
from opgrip.replay.modes import EAGER
from opgrip.replay.outcome import Results
from opgrip.replay.scoring.baselines import MOST_US, Baseline, about_of, is_of_program, is_time, unusual_in
from opgrip.replay.scoring.scores import Score, TraceScore, check_ways, score_traces, way_of
from opgrip.replay.scoring.spread import Uncertainty, deviation_of, of_ratio, of_sum
from opgrip.traces.command import printable
from opgrip.traces.corpus.corpus import Corpus
from opgrip.traces.corpus.distill import FIELD, Distilled
from opgrip.traces.errors import UserError
from opgrip.traces.tables import TableColumn, print_table
from opgrip.traces.terminal import print_line

Times = Mapping[tuple[str, str], float]
"""In us, by trace and key."""
HELD = 0.1
"""Relative error that is held."""


def times_of(results: Results) -> Times:
    """The times of results of several traces, of cases as they were recorded; the median of those that are alike.

    Raises
    ------
    UserError : where options decided what the times are, or they are of several threads or caches
    """
    if unusual := unusual_in(results):
        raise UserError(f"these results are of {', '.join(unusual)}", "replay the traces without such options")
    _variant_of(results)
    return _medians(
        (row.trace, row.key, time_us)
        for row in results
        if is_plain_but_threads(row) and row.status == OK and row.key and is_time(time_us := row.median_us or 0.0)
    )


def machine_of(results: Results) -> str:
    """Whose times results are, in a few words, with the threads and the cache that their rows have."""
    about, variant = about_of(results), _variant_of(results)
    if variant:
        about.pop("threads", None)
    return ", ".join(filter(None, (Baseline(about).machine, variant)))


def _variant_of(results: Results) -> str:
    """The threads and the cache of rows that are plain but for them; an error where these differ."""
    variants = list(dict.fromkeys(row.variant for row in results if is_plain_but_threads(row)))
    if len(variants) > 1:
        ways = " and ".join(variant or "as in the program" for variant in variants[:2])
        raise UserError(f"these results are of several ways to run: {ways}", "replay with one of --threads and --cache")
    return variants[0] if variants else ""


def times_of_baseline(baseline: Baseline) -> Times:
    """The times that a baseline has; the median of those of cases that are called alike."""
    return _medians(
        (name, key, case.median_us)
        for name, trace in baseline.traces.items()
        for (key, _), case in trace.cases.items()
        if case.median_us is not None
    )


def _medians(rows: Iterable[tuple[str, str, float]]) -> Times:
    """Of the times of each trace and key."""
    times: dict[tuple[str, str], list[float]] = {}
    for trace, key, time_us in rows:
        times.setdefault((trace, key), []).append(time_us)
    return {pair: median(values) for pair, values in times.items()}


def is_plain_but_threads(row: Result) -> bool:
    """Whether a row is of a case as it was recorded, on whatever threads and caches there are."""
    return row.mode == EAGER and row.values == RECORDED and is_of_program(row)


@dataclass(frozen=True, slots=True)
class Check:
    """A trace whose time is known, and what the distilled cases say of it."""

    trace: str
    real_us: float
    predicted_us: float

    @property
    def error(self) -> float:
        """Relative; below 0 where too little is predicted."""
        return self.predicted_us / self.real_us - 1


def check_of(corpus: Corpus, distilled: Distilled, times: Times) -> list[Check]:
    """Hold what is predicted of each trace against the sum of its cases' times in another replay."""
    # a score knows of a case what it takes after the calls of the trace that it is written from
    chosen = {key: times[trace, key] for key, trace in distilled.sources.items() if (trace, key) in times}
    checks = []
    for name, rows in corpus.frame[corpus.frame["trace"].isin(list(distilled.weights_us))].groupby("trace", sort=False):
        timed = [(count, times.get((str(name), key)), us) for count, key, us in _columns(rows)]
        known_us = fsum(count * us for count, time, us in timed if time is not None)
        real_us = fsum(count * time for count, time, _ in timed if time is not None)
        whole_us = fsum(count * us for count, _, us in timed)
        predicted_us = distilled.predicted_us(str(name), chosen)
        if real_us > 0 and isfinite(predicted_us):
            # of cases that have no time there, nothing can be held
            checks.append(Check(str(name), real_us, predicted_us * known_us / whole_us))
    return checks


def _columns(rows: Any) -> Any:
    return zip(rows["count"].tolist(), rows["key"].tolist(), rows["median_us"].tolist(), strict=True)


def print_check(checks: Sequence[Check], file: IO[str]) -> None:
    """Print a line a trace, and how many are held."""
    columns = [
        TableColumn("trace", [printable(item.trace) for item in checks], is_number=False),
        TableColumn("real ms", [f"{item.real_us / 1e3:,.2f}" for item in checks]),
        TableColumn("predicted ms", [f"{item.predicted_us / 1e3:,.2f}" for item in checks]),
        TableColumn("error", [f"{item.error:+.1%}" for item in checks]),
    ]
    if checks:
        print_table(columns, file)
    held = sum(abs(item.error) <= HELD for item in checks)
    print_line(f"{held} of {len(checks)} traces are predicted within {HELD:.0%}", file)


def distilled_scores(results: Results) -> list[Score]:
    """The score of each way in which distilled cases were run; none where the results are of no distilled trace.

    Raises
    ------
    UserError : where the trace, which may be a stranger's, does not say what its cases stand for
    """
    standing = standing_of(results.header)
    if standing is None:
        return []
    unusual = unusual_in(results)
    ways: dict[str, dict[str, Result]] = {}
    for row in results:
        if is_of_program(row):
            ways.setdefault(way_of(row, unusual), {}).setdefault(row.key, row)
    check_ways(len(ways), len(standing.weights_us))
    scores = []
    for way, rows in ways.items():
        traces = [_trace(origin, weights_us, rows) for origin, weights_us in standing.weights_us.items()]
        own = [rows[key] for key in standing.keys if key in rows]
        scores.append(score_traces(way, traces, standing.base, len(traces), own))
    return scores


@dataclass(frozen=True, slots=True)
class Standing:
    """What a trace's header says that its cases stand for.

    Attributes
    ----------
    base : whose times these are
    weights_us : by trace, and by key of a case, the time that it stands for there
    """

    keys: Sequence[str]
    base: str
    weights_us: Mapping[Origin, Mapping[str, float]]


def standing_of(header: Mapping[str, Any]) -> Standing | None:
    """What a trace's cases stand for; None where it was not distilled.

    Raises
    ------
    UserError : where the header, which may be a stranger's, says nonsense of it
    """
    field = header.get(FIELD)
    if field is None:
        return None
    try:
        keys = field["keys"]
        if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys) or len({*keys}) < len(keys):
            raise ValueError("no keys")
        weights = {origin_in(name, about): _weights_us(about, keys) for name, about in field["traces"].items()}
        return Standing(keys, str(field.get("base") or CAPTURED)[:MOST_NAME], weights)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError("the trace does not say what its cases stand for", "write it again with distill") from error


CAPTURED = "the times that its cases were captured with"
"""What distilled cases are held against that were not fitted to a replay."""
MOST_NAME = 200
"""Characters that are shown of a machine's name."""


def _trace(origin: Origin, weights_us: Mapping[str, float], rows: Mapping[str, Result]) -> TraceScore:
    """A trace of which each case stands for some time; times are those of the rows' captured ones."""
    weights = [(rows.get(key), us) for key, us in weights_us.items()]
    pairs = [(row, us) for row, us in weights if row is not None and row.status != SKIPPED and is_time(row.captured_us)]
    timed = [(row, us) for row, us in pairs if row.status == OK and is_time(row.median_us)]
    ok = [(row, us, us * (row.median_us or 0.0) / row.captured_us) for row, us in timed]
    return TraceScore(
        origin,
        Counter(row.status for row, _ in pairs),
        sum(row.is_slowed for row, _ in pairs),
        fsum(time for _, _, time in ok),
        len(ok),
        base_us=fsum(us for _, us in pairs),
        ok_base_us=fsum(us for _, us, _ in ok),
        ok_us=fsum(time for _, _, time in ok),
        whole_us=fsum(us for _, us in weights),
        uncertainty=_uncertainty(ok),
        problem=_problem(weights, pairs),
    )


def _weights_us(about: Mapping[str, Any], keys: Sequence[str]) -> dict[str, float]:
    """What each case stands for, by its key; a `ValueError` where that is nonsense."""
    weights_us: dict[str, float] = {}
    for place, us in zip(about["cases"], about["us"], strict=True):
        if type(place) is not int or not 0 <= place < len(keys) or keys[place] in weights_us:
            raise ValueError("no place of a case, or one twice")
        if type(us) not in (int, float) or not 0 <= us < MOST_US:
            raise ValueError("no time")
        weights_us[keys[place]] = us
    return weights_us


def _problem(weights: Sequence[tuple[Result | None, float]], pairs: Sequence[tuple[Result, float]]) -> str:
    if not pairs:
        return "none of its cases was replayed"
    return "some of its cases were not replayed" if any(row is None for row, _ in weights) else ""


def _uncertainty(ok: Sequence[tuple[Result, float, float]]) -> Uncertainty:
    """Of the ratio of this replay and the times of the trace; a case has one time, whatever traces it stands for."""
    here = of_sum((row.key, time, row.median_us or 0.0, deviation_of(row)) for row, _, time in ok)
    there = of_sum(((row.key,), us, row.captured_us, _usual(row.captured_us)) for row, us, _ in ok)
    return of_ratio(here, there)


def _usual(one_us: float) -> float:
    """The deviation of a time of whose repeats nothing is known."""
    return sqrt(USUAL[one_us < SHORT_US].variance)
