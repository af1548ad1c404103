"""Times of cases by trace and key, and what a score is of: variant, machine and header."""

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
    """What was measured.

    Attributes
    ----------
    way : the mode, and what else was not as usual: `compile, 2 threads`
    machine : its processor, its device, its torch and its threads, in a few words
    device : the name of it
    torch : its version
    trace, trace_hash : what was replayed; of several traces the hash of theirs
    """

    way: str
    machine: str = ""
    device: str = ""
    torch: str = ""
    trace: str = ""
    trace_hash: str = ""


def measured_of(results: Results, way: str, rows: Iterable[Result]) -> Measured:
    """What the rows of a way are of, as the header of their results says it, which may be a stranger's."""
    about = about_of(results)
    if any(row.threads is not None for row in rows):
        # the way names them
        about.pop("threads", None)
    words = (str(results.header.get(name) or "") for name in ("device", "torch", "trace", "trace_hash"))
    return Measured(way, Baseline(about).machine, *words)


def way_of(row: Result, unusual: Sequence[str]) -> str:
    """How a row was run, in words: a device that is not the processor, and what all its run's rows have, last."""
    device = "" if row.device == CPU else row.device
    return ", ".join(filter(None, (row.mode, device, row.variant, *unusual)))


Times = Mapping[tuple[str, str], float]
"""In us, by trace and key."""


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


def is_replay_of(times: Times, others: Times) -> bool:
    """Whether most of the times that both have are the same ones: of one replay, rounded or not."""
    shared = [(time, others[pair]) for pair, time in times.items() if pair in others]
    # two replays have a few times alike by chance; a baseline rounds to five digits
    return 2 * sum(isclose(*pair, rel_tol=1e-4) for pair in shared) > len(shared)
