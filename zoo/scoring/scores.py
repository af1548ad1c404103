"""The score: how many times as fast as a baseline a device or compiler runs real models.

docs/score.md explains the rules; each rule is a function here.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import fsum, log

from opgrip.cli.command import counted
from opgrip.errors import UserError
from opgrip.replay.outcome import Results
from opgrip.replay.results.origins import Origin, origin_in, origin_of
from opgrip.replay.results.results import CONTENDED, OK, SKIPPED, UNSUPPORTED, Result
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
from opgrip.zoo.scoring.score_values import ModelScore, Score, TraceScore, weights_of
from opgrip.zoo.scoring.spread import Uncertainty, deviation_of, interval_of, of_ratio, of_sum

MOST_SCORES = 20_000  # maximum number of trace scores, over all variants


def score_of(results: Results, baseline: Baseline) -> list[Score]:
    """Return one score for each run configuration in the results of several traces, in the order of their rows."""
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
    requested = results.header.get("traces")
    unmatched = len(({*requested} & baseline.traces.keys()) - origins.keys()) if isinstance(requested, Mapping) else 0
    return [
        replace(_score(results, way, rows, origins, why, baseline), unmatched=unmatched)
        for way, rows in rows_of.items()
    ]


def check_ways(ways: int, traces: int) -> None:
    """Raise `UserError` if scoring would take minutes, as for untrusted results with very many run configurations."""
    if ways * traces > MOST_SCORES:
        problem = f"{counted(ways, 'run configuration')} for {counted(traces, 'trace')} are too many to score"
        raise UserError(problem, "score fewer traces or modes")


def is_counted(row: Result) -> bool:
    """Return True if a row counts for a score: its trace has a name, and its case was run as in the program, see
    `is_of_program`.
    """
    return bool(row.trace) and is_of_program(row)


# kinds of devices, and the names of torch's operators that are kernels of such a device or of a library for it
OF_DEVICE = (
    ("cpu", re.compile(r"_for_cpu(_|\b)|_cpu_fallback|mkldnn|onednn|fbgemm")),
    ("cuda", re.compile(r"cudnn|miopen|_cslt_")),
    ("mps", re.compile(r"_for_mps(_|\b)|\b_?mps_")),
)


def is_left_out(row: Result) -> bool:
    """Return True if a case does not count, because its operator exists only for another kind of device.

    For example, a kernel of cuDNN cannot run on a CPU, and has no equivalent there.
    """
    if row.status != UNSUPPORTED or not row.op.startswith("aten."):
        return False
    kind = next((kind for kind, pattern in OF_DEVICE if pattern.search(row.op)), None)
    return kind is not None and kind != row.device.partition(":")[0]


def _problems(results: Results) -> Iterable[tuple[str, tuple[Origin, str]]]:
    """Yield traces that were not replayed, each with its origin and the reason, from the header of results."""
    traces = results.header.get("traces")
    for name, about in traces.items() if isinstance(traces, Mapping) else ():
        if isinstance(about, Mapping) and about.get("problem"):
            yield str(name), (origin_in(str(name), about), str(about["problem"]))


def _other_recordings(
    results: Results, baseline: Baseline, origins: Mapping[str, Origin]
) -> Iterator[tuple[str, tuple[Origin, str]]]:
    """Yield traces whose baseline was measured with another recording of the trace, each with its origin and a text
    that says so.

    The numbers of calls of two recordings can differ.
    """
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
    """Return the score of all models from the scores of their traces in one run configuration.

    measured : the run configuration, machine and trace
    baseline : machine of the baseline
    of_traces : number of traces in the baseline
    """
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
    """Return the models with their weights in the total score; a model without a score has the weight 0."""
    weights = {model.model: weight for model, weight in weights_of([item for item in models if item.score])}
    return [replace(item, weight=weights.get(item.model, 0.0)) for item in models]


def score_trace(origin: Origin, rows: Sequence[Result], base: BaselineTrace | None, problem: str = "") -> TraceScore:
    """Return the score of one trace against its times in the baseline.

    origin : the trace and its model
    rows : rows of the trace in one run configuration
    base : times of the trace in the baseline; None if the baseline lacks it
    problem : reason why the trace was not replayed; empty if it was, or if the reason is unknown
    """
    statuses, slowed = Counter(row.status for row in rows), sum(row.is_slowed for row in rows)
    time_us = fsum(
        max(row.count, 1) * (row.median_us or 0.0) for row in rows if row.status == OK and is_time(row.median_us)
    )
    if not rows or base is None:
        why = problem or ("no baseline" if rows else "not replayed")
        return TraceScore(
            origin, statuses, slowed, time_us, whole_us=0.0 if base is None else base.total_us, problem=why
        )
    # leave out cases that say nothing about this machine: they fail in the program too, have no time in the baseline,
    # or were contended
    run = [row for row in rows if row.status not in (SKIPPED, CONTENDED)]
    joined = [(row, base.cases[key]) for key, row in keyed(run) if key in base.cases]
    timed = [(row, case) for row, case in joined if case.median_us is not None]
    pairs = [(row, case) for row, case in timed if not is_left_out(row)]
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
        left_out_us=fsum(case.total_us for row, case in timed if is_left_out(row)),
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
