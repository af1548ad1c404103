"""The score from a replay of a distilled trace, whose few cases represent many models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import fsum, sqrt
from typing import Any

from opgrip.errors import UserError
from opgrip.replay.comparison.priors import SHORT_US, USUAL
from opgrip.replay.outcome import Results
from opgrip.replay.results.origins import Origin, origin_in
from opgrip.replay.results.results import CONTENDED, OK, SKIPPED, Result
from opgrip.traces.zoo.manifest import FIELD
from opgrip.zoo.scoring.baselines import MOST_US, is_of_program, is_time, unusual_in
from opgrip.zoo.scoring.case_times import is_plain_but_threads, machine_of, measured_of, way_of
from opgrip.zoo.scoring.score_values import Score, TraceScore
from opgrip.zoo.scoring.scores import check_ways, is_left_out, score_traces
from opgrip.zoo.scoring.spread import Uncertainty, deviation_of, of_ratio, of_sum


def distilled_scores(results: Results, baseline: Results | None = None) -> list[Score]:
    """Return one score for each run configuration in the results of a distilled trace; an empty list for another trace.

    baseline : results of another replay of the same trace, to compare with instead of the times in the trace

    Raises UserError if the trace, which may be untrusted, does not say which original cases its cases represent,
    or if the baseline is of another trace.
    """
    standing = standing_of(results.header)
    if standing is None:
        return []
    references: Mapping[str, CaseReference] | None = None
    if baseline is not None:
        _check_same_trace(baseline, results)
        standing, references = _rebased(standing, baseline)
    unusual = unusual_in(results)
    ways: dict[str, dict[str, Result]] = {}
    for row in results:
        if is_of_program(row):
            ways.setdefault(way_of(row, unusual), {}).setdefault(row.key, row)
    check_ways(len(ways), len(standing.weights_us))
    scores = []
    for way, rows in ways.items():
        base = _captured(rows) if references is None else references
        traces = [_trace(origin, weights_us, rows, base) for origin, weights_us in standing.weights_us.items()]
        own = [rows[key] for key in standing.keys if key in rows]
        scores.append(score_traces(measured_of(results, way, own), traces, standing.base, len(traces), own))
    return scores


def _check_same_trace(baseline: Results, results: Results) -> None:
    trace_hash = results.header.get("trace_hash")
    if not trace_hash or baseline.header.get("trace_hash") != trace_hash:
        raise UserError(
            "the baseline is not a replay of the same distilled trace", "replay this file on the baseline's machine"
        )
    if unusual := unusual_in(baseline):
        raise UserError(f"the baseline was made with {', '.join(unusual)}", "replay the trace without these options")


@dataclass(frozen=True, slots=True)
class Standing:
    """The times in the original traces that the cases of a distilled trace represent, as stored in its header.

    keys : keys of the cases
    base : machine on which the times were measured
    weights_us : by original trace and key, the time that the case represents
    """

    keys: Sequence[str]
    base: str
    weights_us: Mapping[Origin, Mapping[str, float]]


def standing_of(header: Mapping[str, Any]) -> Standing | None:
    """Return, from a trace's header, the time of other traces' calls that each case represents; None for a trace that
    was not made by `opgrip corpus distill`.

    Raises UserError if the header, which may be untrusted, is invalid.
    """
    field = header.get(FIELD)
    if field is None:
        return None
    try:
        keys = field["keys"]
        if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys) or len({*keys}) < len(keys):
            raise ValueError("the keys of the cases are not a list of different texts")
        weights = {origin_in(name, about): _weights_us(about, keys) for name, about in field["traces"].items()}
        return Standing(keys, str(field.get("base") or CAPTURED)[:MOST_NAME], weights)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            "the trace does not say which original cases each of its cases represents",
            "write it again with opgrip corpus distill",
        ) from error


# description of the reference times if the cases were not fitted to a replay
CAPTURED = "the captured times of its cases"
MOST_NAME = 200  # maximum number of characters shown of a machine's name


@dataclass(frozen=True, slots=True)
class CaseReference:
    """Time of a case with which its replayed time is compared.

    time_us : time of one call
    deviation : standard deviation of the logarithm of the time
    """

    time_us: float
    deviation: float


def _captured(rows: Mapping[str, Result]) -> dict[str, CaseReference]:
    """Return, by key, the captured time of each case, with which its replayed time is compared."""
    times = {key: row.captured_us for key, row in rows.items() if is_time(row.captured_us)}
    # their spread over repeated captures is unknown
    return {key: CaseReference(us, sqrt(USUAL[us < SHORT_US].variance)) for key, us in times.items()}


def _rebased(standing: Standing, baseline: Results) -> tuple[Standing, dict[str, CaseReference]]:
    """Return the times that each case represents, converted to the machine of a baseline, and the baseline's time of
    each case.

    Cases that failed in the baseline, or have no captured time, are left out.
    """
    rows: dict[str, Result] = {}
    for row in baseline:
        if is_plain_but_threads(row) and row.status == OK and is_time(row.median_us) and is_time(row.captured_us):
            rows.setdefault(row.key, row)
    references = {key: CaseReference(row.median_us or 0.0, deviation_of(row)) for key, row in rows.items()}
    weights_us = {
        origin: {key: us * references[key].time_us / rows[key].captured_us for key, us in own.items() if key in rows}
        for origin, own in standing.weights_us.items()
    }
    return Standing(standing.keys, machine_of(baseline), weights_us), references


def _trace(
    origin: Origin, weights_us: Mapping[str, float], rows: Mapping[str, Result], references: Mapping[str, CaseReference]
) -> TraceScore:
    """Return the score of one of the traces that the distilled trace represents."""
    weights = [(rows.get(key), references.get(key), us) for key, us in weights_us.items()]
    pairs = [(row, base, us) for row, base, us in weights if row is not None and base is not None]
    run = [(row, base, us) for row, base, us in pairs if row.status not in (SKIPPED, CONTENDED)]
    pairs = [(row, base, us) for row, base, us in run if not is_left_out(row)]
    timed = [(row, base, us) for row, base, us in pairs if row.status == OK and is_time(row.median_us)]
    ok = [_Pair(row, base, us, us * (row.median_us or 0.0) / base.time_us) for row, base, us in timed]
    return TraceScore(
        origin,
        Counter(row.status for row, _, _ in run),
        sum(row.is_slowed for row, _, _ in run),
        fsum(pair.time_us for pair in ok),
        len(ok),
        base_us=fsum(us for _, _, us in pairs),
        ok_base_us=fsum(pair.base_us for pair in ok),
        ok_us=fsum(pair.time_us for pair in ok),
        whole_us=fsum(us for _, _, us in weights),
        left_out_us=fsum(us for row, _, us in run if is_left_out(row)),
        uncertainty=_uncertainty(ok),
        problem=_problem([row for row, _, _ in weights], [row for row, _, _ in run]),
    )


@dataclass(frozen=True, slots=True)
class _Pair:
    """A replayed case with correct results, and the time that it is compared with.

    row : the replayed row
    reference : time of one call to compare with
    base_us : time that the case represents in the original trace
    time_us : the same, converted to the machine of the replay
    """

    row: Result
    reference: CaseReference
    base_us: float
    time_us: float


def _weights_us(about: Mapping[str, Any], keys: Sequence[str]) -> dict[str, float]:
    """Return the time that each case represents in an original trace, by key; raise `ValueError` for invalid data."""
    weights_us: dict[str, float] = {}
    for place, us in zip(about["cases"], about["us"], strict=True):
        if type(place) is not int or not 0 <= place < len(keys) or keys[place] in weights_us:
            raise ValueError(f"an invalid or repeated number of a case: {str(place)[:40]}")
        if type(us) not in (int, float) or not 0 <= us < MOST_US:
            raise ValueError(f"the time of a case is not a number, negative or too large: {str(us)[:40]}")
        weights_us[keys[place]] = us
    return weights_us


def _problem(weighed: Sequence[Result | None], compared: Sequence[Result]) -> str:
    if not weighed:
        return "no baseline"
    if not compared:
        return "no case was replayed"
    return "some cases were not replayed" if None in weighed else ""


def _uncertainty(ok: Sequence[_Pair]) -> Uncertainty:
    """Return the uncertainty of the ratio of the replayed to the reference time of an original trace.

    One measurement of a case enters the ratios of all original traces that the case represents.
    """
    here = of_sum((item.row.key, item.time_us, item.row.median_us or 0.0, deviation_of(item.row)) for item in ok)
    there = of_sum(((item.row.key,), item.base_us, item.reference.time_us, item.reference.deviation) for item in ok)
    return of_ratio(here, there)
