"""Scores of results: the speed of a device or compiler on real models, relative to a baseline."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import fsum, log, sqrt
from typing import Any

from opgrip.cli.command import counted
from opgrip.errors import UserError
from opgrip.replay.reports.comparison.unpaired_ratio import SHORT_US, USUAL
from opgrip.replay.reports.outcome import Results
from opgrip.replay.results.origins import Origin, origin_in, origin_of
from opgrip.replay.results.results import CONTENDED, OK, SKIPPED, UNSUPPORTED, Result
from opgrip.traces.zoo.manifest import FIELD
from opgrip.zoo.scoring.baselines import (
    MOST_US,
    Baseline,
    BaselineCase,
    BaselineTrace,
    Measured,
    deviation_of,
    interval_of,
    is_of_program,
    is_plain_but_threads,
    is_time,
    keyed,
    machine_of,
    measured_of,
    of_ratio,
    of_sum,
    unusual_in,
    way_of,
)
from opgrip.zoo.scoring.score_values import ModelScore, Score, TraceScore, weights_of

MOST_SCORES = 20_000  # maximum number of trace scores, over all variants


def score_of(results: Results, baseline: Baseline) -> list[Score]:
    unusual = unusual_in(results)
    rows_of: dict[str, dict[str, list[Result]]] = defaultdict(lambda: defaultdict(list))
    origins: dict[str, Origin] = {}
    for row in results:
        if row.trace and is_of_program(row):
            rows_of[way_of(row, unusual)][row.trace].append(row)
            origins.setdefault(row.trace, origin_of(row))
    problems = {**dict(_other_recordings(results, baseline, origins)), **dict(_problems(results))}
    origins |= {name: origin for name, (origin, _) in problems.items() if name not in origins}
    why = {name: problem for name, (_, problem) in problems.items()}
    check_ways(len(rows_of), len(origins))
    requested = results.header.get("traces")
    unmatched = len(({*requested} & baseline.traces.keys()) - origins.keys()) if isinstance(requested, Mapping) else 0
    return [
        replace(_score(results, way, rows, origins, why, baseline), unmatched=unmatched)
        for way, rows in rows_of.items()
    ]


def check_ways(ways: int, traces: int) -> None:
    if ways * traces > MOST_SCORES:
        problem = f"{counted(ways, 'run configuration')} for {counted(traces, 'trace')} are too many to score"
        raise UserError(problem, "score fewer traces or modes")


# by kind of device, the names of torch's operators that are kernels of such a device or of a library for it
OF_DEVICE = (
    ("cpu", re.compile(r"_for_cpu(_|\b)|_cpu_fallback|mkldnn|onednn|fbgemm")),
    ("cuda", re.compile(r"cudnn|miopen|_cslt_")),
    ("mps", re.compile(r"_for_mps(_|\b)|\b_?mps_")),
)


def is_left_out(row: Result) -> bool:
    """Return True if a case is unsupported because its operator exists only for another kind of device."""
    if row.status != UNSUPPORTED or not row.op.startswith("aten."):
        return False
    kind = next((kind for kind, pattern in OF_DEVICE if pattern.search(row.op)), None)
    return kind is not None and kind != row.device.partition(":")[0]


def _problems(results: Results) -> Iterable[tuple[str, tuple[Origin, str]]]:
    traces = results.header.get("traces")
    for name, about in traces.items() if isinstance(traces, Mapping) else ():
        if isinstance(about, Mapping) and about.get("problem"):
            yield str(name), (origin_in(str(name), about), str(about["problem"]))


def _other_recordings(
    results: Results, baseline: Baseline, origins: Mapping[str, Origin]
) -> Iterator[tuple[str, tuple[Origin, str]]]:
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
    by_model: dict[str, list[TraceScore]] = defaultdict(list)
    for trace in traces:
        by_model[trace.origin.model].append(trace)
    models = [ModelScore(name, own[0].origin.library, own[0].origin.family, own) for name, own in by_model.items()]
    # charge a model that cannot run at all as if it were as fast as the others
    pace = Score(measured, _weighed(models)).speed
    models = _weighed([replace(item, traces=[replace(trace, pace=pace) for trace in item.traces]) for item in models])
    interval = interval_of([(log(item.score), item.weight) for item in models if item.score])
    slowed = sum(row.is_slowed for row in rows) / max(len(rows), 1)
    return Score(measured, models, baseline, interval, of_traces, slowed)


def _weighed(models: Sequence[ModelScore]) -> list[ModelScore]:
    weights = {model.model: weight for model, weight in weights_of([item for item in models if item.score])}
    return [replace(item, weight=weights.get(item.model, 0.0)) for item in models]


def score_trace(origin: Origin, rows: Sequence[Result], base: BaselineTrace | None, problem: str = "") -> TraceScore:
    statuses, slowed = Counter(row.status for row in rows), sum(row.is_slowed for row in rows)
    time_us = fsum(
        max(row.count, 1) * (row.median_us or 0.0) for row in rows if row.status == OK and is_time(row.median_us)
    )
    if not rows or base is None:
        why = problem or ("no baseline" if rows else "not replayed")
        return TraceScore(
            origin, statuses, slowed, time_us, whole_us=0.0 if base is None else base.total_us, problem=why
        )
    # these say nothing about this machine: they fail in the program too, or were contended
    run = [row for row in rows if row.status not in (SKIPPED, CONTENDED)]
    compared = [
        Compared(row, (origin.trace, index), case.total_us, case)
        for index, (key, row) in enumerate(keyed(run))
        if (case := base.cases.get(key)) is not None and case.median_us is not None
    ]
    is_compared = any(not is_left_out(item.row) for item in compared)
    return replace(
        compare_cases(origin, compared),
        statuses=statuses,
        slowed=slowed,
        time_us=time_us,
        whole_us=base.total_us,
        problem=problem or ("" if is_compared else "the baseline has other cases"),
    )


@dataclass(frozen=True, slots=True)
class Compared:
    row: Result
    name: Hashable
    base_us: float
    case: BaselineCase

    @property
    def time_us(self) -> float:
        return self.base_us * (self.row.median_us or 0.0) / (self.case.median_us or 1.0)


def compare_cases(origin: Origin, compared: Sequence[Compared]) -> TraceScore:
    run = [item for item in compared if item.row.status not in (SKIPPED, CONTENDED)]
    counted_cases = [item for item in run if not is_left_out(item.row)]
    ok = [item for item in counted_cases if item.row.status == OK and is_time(item.row.median_us)]
    here = of_sum((item.name, item.time_us, item.row.median_us or 0.0, deviation_of(item.row)) for item in ok)
    there = of_sum(
        (("baseline", item.name), item.base_us, item.case.median_us or 0.0, item.case.deviation) for item in ok
    )
    return TraceScore(
        origin,
        compared=len(ok),
        base_us=fsum(item.base_us for item in counted_cases),
        ok_base_us=fsum(item.base_us for item in ok),
        ok_us=fsum(item.time_us for item in ok),
        left_out_us=fsum(item.base_us for item in run if is_left_out(item.row)),
        uncertainty=of_ratio(here, there),
    )


def distilled_scores(results: Results, baseline: Results | None = None) -> list[Score]:
    """Return one score for each run configuration in the results of a distilled trace.

    baseline : results of another replay of the same trace, to compare with instead of the times in the trace
    """
    represented = represented_times(results.header)
    if represented is None:
        return []
    references: Mapping[str, BaselineCase] | None = None
    if baseline is not None:
        _check_same_trace(baseline, results)
        represented, references = _rebased(represented, baseline)
    unusual = unusual_in(results)
    ways: dict[str, dict[str, Result]] = {}
    for row in results:
        if is_of_program(row):
            ways.setdefault(way_of(row, unusual), {}).setdefault(row.key, row)
    check_ways(len(ways), len(represented.weights_us))
    scores = []
    for way, rows in ways.items():
        base = _captured(rows) if references is None else references
        traces = [_trace(origin, weights_us, rows, base) for origin, weights_us in represented.weights_us.items()]
        own = [rows[key] for key in represented.keys if key in rows]
        scores.append(score_traces(measured_of(results, way, own), traces, represented.base, len(traces), own))
    return scores


def _check_same_trace(baseline: Results, results: Results) -> None:
    trace_hash = results.header.get("trace_hash")
    if not trace_hash or baseline.header.get("trace_hash") != trace_hash:
        raise UserError(
            "the baseline is not a replay of the same distilled trace", "replay this file on the baseline's machine"
        )
    if unusual := unusual_in(baseline):
        raise UserError(
            f"the baseline was made with {', '.join(unusual)}", "make the baseline again, without these options"
        )


@dataclass(frozen=True, slots=True)
class RepresentedTimes:
    """Times that the cases of a distilled trace represent, from the trace's header.

    weights_us : by original trace and key, the time that the case represents
    """

    keys: Sequence[str]
    base: str
    weights_us: Mapping[Origin, Mapping[str, float]]


def represented_times(header: Mapping[str, Any]) -> RepresentedTimes | None:
    field = header.get(FIELD)
    if field is None:
        return None
    try:
        keys = field["keys"]
        if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys) or len({*keys}) < len(keys):
            raise ValueError("the keys of the cases are not a list of different texts")
        weights = {origin_in(name, about): _weights_us(about, keys) for name, about in field["traces"].items()}
        return RepresentedTimes(keys, str(field.get("base") or CAPTURED)[:MOST_NAME], weights)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            "the trace does not say which original cases each of its cases represents",
            "write it again with opgrip corpus distill",
        ) from error


CAPTURED = "the captured times of its cases"  # in place of a machine
MOST_NAME = 200  # maximum number of characters shown of a machine's name


def _captured(rows: Mapping[str, Result]) -> dict[str, BaselineCase]:
    times = {key: row.captured_us for key, row in rows.items() if is_time(row.captured_us)}
    # their spread over repeated captures is unknown
    return {key: BaselineCase(1, us, sqrt(USUAL[us < SHORT_US].variance)) for key, us in times.items()}


def _rebased(represented: RepresentedTimes, baseline: Results) -> tuple[RepresentedTimes, dict[str, BaselineCase]]:
    rows: dict[str, Result] = {}
    for row in baseline:
        if is_plain_but_threads(row) and row.status == OK and is_time(row.median_us) and is_time(row.captured_us):
            rows.setdefault(row.key, row)
    references = {key: BaselineCase(1, row.median_us, deviation_of(row)) for key, row in rows.items()}
    factors = {key: references[key].total_us / row.captured_us for key, row in rows.items() if row.captured_us}
    weights_us = {
        origin: {key: us * factors[key] for key, us in own.items() if key in factors}
        for origin, own in represented.weights_us.items()
    }
    return RepresentedTimes(represented.keys, machine_of(baseline), weights_us), references


def _trace(
    origin: Origin, weights_us: Mapping[str, float], rows: Mapping[str, Result], references: Mapping[str, BaselineCase]
) -> TraceScore:
    compared = [
        Compared(rows[key], key, us, references[key])
        for key, us in weights_us.items()
        if key in rows and key in references
    ]
    run = [item.row for item in compared if item.row.status not in (SKIPPED, CONTENDED)]
    if not weights_us:
        problem = "no baseline"
    elif not run:
        problem = "no case was replayed"
    else:
        problem = "some cases were not replayed" if weights_us.keys() - rows.keys() else ""
    score = compare_cases(origin, compared)
    return replace(
        score,
        statuses=Counter(row.status for row in run),
        slowed=sum(row.is_slowed for row in run),
        time_us=score.ok_us,
        whole_us=fsum(weights_us.values()),
        problem=problem,
    )


def _weights_us(about: Mapping[str, Any], keys: Sequence[str]) -> dict[str, float]:
    weights_us: dict[str, float] = {}
    for index, us in zip(about["cases"], about["us"], strict=True):
        if type(index) is not int or not 0 <= index < len(keys) or keys[index] in weights_us:
            raise ValueError(f"an invalid or repeated number of a case: {str(index)[:40]}")
        if type(us) not in (int, float) or not 0 <= us < MOST_US:
            raise ValueError(f"the time of a case is negative, too large or not a number: {str(us)[:40]}")
        weights_us[keys[index]] = us
    return weights_us
