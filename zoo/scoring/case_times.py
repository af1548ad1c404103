"""Times of cases by trace and key, and descriptions of the run configuration and machine behind a score."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isclose
from statistics import median

from opgrip.errors import UserError
from opgrip.replay.inputs.input_options import RECORDED
from opgrip.replay.modes import EAGER
from opgrip.replay.outcome import Results
from opgrip.replay.results.results import OK, Result
from opgrip.zoo.scoring.baselines import Baseline, about_of, is_of_program, is_time, unusual_in

CPU = "cpu"


@dataclass(frozen=True, slots=True)
class Measured:
    """Description of the measurements from which a score is computed.

    way : the run configuration: mode, and what differs from the recorded call, such as `compile, 2 threads`
    machine : processor, device, version of torch and number of threads, as a short text
    device : name of the device
    torch : version of torch
    trace, trace_hash : name and hash of the replayed trace; for several traces, their common hash
    """

    way: str
    machine: str = ""
    device: str = ""
    torch: str = ""
    trace: str = ""
    trace_hash: str = ""


def measured_of(results: Results, way: str, rows: Iterable[Result]) -> Measured:
    """Return the description of the measurements in some rows, from the header of their results, which may be
    untrusted.

    way : text on the run configuration of the rows, see `way_of`
    rows : rows of one run configuration
    """
    about = about_of(results)
    if any(row.threads is not None for row in rows):
        # the variant names them
        about.pop("threads", None)
    words = (str(results.header.get(name) or "") for name in ("device", "torch", "trace", "trace_hash"))
    return Measured(way, Baseline(about).machine, *words)


def way_of(row: Result, unusual: Sequence[str]) -> str:
    """Return a text on a row's run configuration: mode, device unless it is the CPU, differences from the recorded
    call.

    unusual : texts on options of the whole replay, see `unusual_in`
    """
    device = "" if row.device == CPU else row.device
    return ", ".join(filter(None, (row.mode, device, row.variant, *unusual)))


Times = Mapping[tuple[str, str], float]  # time in us by trace and key


def times_of(results: Results) -> Times:
    """Return the times of the cases that were run as recorded, from the results of a replay of several traces.

    Cases of a trace with the same key get the median of their times.

    Raises UserError if the results were made with options that change times, or with several numbers of threads
    or cache states.
    """
    if unusual := unusual_in(results):
        raise UserError(f"these results were made with {', '.join(unusual)}", "replay the traces without these options")
    _variant_of(results)
    return _medians(
        (row.trace, row.key, time_us)
        for row in results
        if is_plain_but_threads(row) and row.status == OK and row.key and is_time(time_us := row.median_us or 0.0)
    )


def machine_of(results: Results) -> str:
    """Return a short text on the machine of results, with the number of threads and cache state of their rows."""
    about, variant = about_of(results), _variant_of(results)
    if variant:
        about.pop("threads", None)
    return ", ".join(filter(None, (Baseline(about).machine, variant)))


def _variant_of(results: Results) -> str:
    """Return a text on the number of threads and cache state of the rows that were otherwise run as recorded."""
    variants = list(dict.fromkeys(row.variant for row in results if is_plain_but_threads(row)))
    if len(variants) > 1:
        ways = " and ".join(variant or "as in the program" for variant in variants[:2])
        raise UserError(
            f"these results have several run configurations: {ways}",
            "replay with one value of --threads and one of --cache",
        )
    return variants[0] if variants else ""


def times_of_baseline(baseline: Baseline) -> Times:
    """Return the times of the cases in a baseline; cases of a trace with the same key get the median of their times."""
    return _medians(
        (name, key, case.median_us)
        for name, trace in baseline.traces.items()
        for (key, _), case in trace.cases.items()
        if case.median_us is not None
    )


def _medians(rows: Iterable[tuple[str, str, float]]) -> Times:
    times: dict[tuple[str, str], list[float]] = {}
    for trace, key, time_us in rows:
        times.setdefault((trace, key), []).append(time_us)
    return {pair: median(values) for pair, values in times.items()}


def is_plain_but_threads(row: Result) -> bool:
    """Return True if a row's case was run as recorded, or as recorded but with another number of threads or
    cache state.
    """
    return row.mode == EAGER and row.values == RECORDED and is_of_program(row)


def is_replay_of(times: Times, others: Times) -> bool:
    """Return True if most times in both are equal up to rounding, which shows that they come from the same replay."""
    shared = [(time, others[pair]) for pair, time in times.items() if pair in others]
    # two replays have a few equal times by chance, and a baseline rounds to five digits
    return 2 * sum(isclose(*pair, rel_tol=1e-4) for pair in shared) > len(shared)
