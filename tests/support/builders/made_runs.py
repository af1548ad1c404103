"""Generated results of replays: rows with times drawn like measured ones."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from opgrip.replay.reports.comparison.results_store import join_repeats
from opgrip.replay.reports.outcome import Results
from opgrip.replay.results.results import OK, Result

HEADER: dict[str, Any] = {
    "trace": "net.jsonl",
    "trace_hash": "00",
    "torch": "2.13.0",
    "device": "cpu",
    "time": "2026-01-02T03:04:05+00:00",
    "environment": {"machine": "here", "processor": "a processor", "versions": {"torch": "2.13.0", "numpy": "2.4"}},
}


def make_row(number: int, times: Sequence[float], **cells: Any) -> Result:
    """Return the row of the case with this number; `times` has the time of each run in us, `cells` other columns."""
    about: dict[str, Any] = {
        "op": f"aten.op{number}.default",
        "shapes": f"float32[{number}]",
        "mode": "eager",
        "device": "cpu",
        "status": OK,
        "key": f"{number:012x}",
        "count": 10,
    } | cells
    median = float(np.median(times)) if len(times) else None
    return Result(
        case=number,
        share=0.1,
        captured_us=1.0,
        captured_total_us=10.0,
        median_us=median,
        samples=len(times),
        times_us=list(times) or None,
        **about,
    )


def make_run(
    seed: int,
    cases: int = 60,
    repeats: int = 5,
    slower: float = 1.0,
    drift: float = 0.005,
    between: float = 0.02,
    runs: int = 20,
    longer_than_us: float = 50.0,
    **cells: Any,
) -> Results:
    """Return generated results of a replay whose cases take 1 us to 1 ms.

    Standard deviations refer to the logarithm of a time.
    """
    generator = np.random.default_rng(seed)
    pace = float(np.exp(generator.normal(0, drift)))
    rows = []
    for number in range(cases):
        usual = 10 ** (3 * number / cases)
        usual *= slower if usual > longer_than_us else 1.0
        medians = usual * pace * np.exp(generator.normal(0, between, repeats))
        times = [list(map(float, median * np.exp(generator.normal(0, 0.1, runs)))) for median in medians]
        rows.append(join_repeats([make_row(number, item, **cells) for item in times]))
    return Results(rows, HEADER)
