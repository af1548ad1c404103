"""Makes one run of several: of parts or shards of a replay, or of repeats of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from opgrip.errors import UserError
from opgrip.replay.compare.store.shards import header_of_shards, in_order, machines_of, shards_in
from opgrip.replay.outcome import Results
from opgrip.replay.results.machines import MachineColumns
from opgrip.replay.results.ratios import reference_of, with_ratios_by_case
from opgrip.replay.results.repeats import join_repeats
from opgrip.replay.results.results import SETTINGS, Result

EQUAL = {
    "trace_hash": "replay one trace",
    "device": "compare them instead: opgrip compare",
    "torch": "compare them instead: opgrip compare",
}
"""What the headers of runs that are merged have in common, and what to do where they have not."""
OF_MACHINE = ("machine", "processor", "governor", "threads")
"""What their environments have in common."""
HINT = "times of other machines do not mix: opgrip compare holds them side by side"


def merge_runs(runs: Sequence[Results]) -> Results:
    """The rows of all; those that several have become one, with a repeat of each.

    Shards may be of several machines of one kind: each case was measured on one of them, and no ratio is of two.

    Raises
    ------
    UserError : where they are of other traces, devices, machines or versions, whose times say nothing of each other
    """
    shards = shards_in(runs)
    of_machine = OF_MACHINE if shards is None else [name for name in OF_MACHINE if name != "machine"]
    if shards is not None:
        # one without cases has nothing to differ in
        _check_distinct(runs)
        whole, runs = runs, [run for run in runs if run.rows] or runs[:1]
    first = runs[0]
    if not any(run.header for run in runs):
        raise UserError("these files do not say what their times are of", "merge .json or .parquet files")
    for name, hint in EQUAL.items():
        _check_equal(name, [run.header.get(name) for run in runs], hint)
    _check_equal("options", [_options(run, is_shard=shards is not None) for run in runs], EQUAL["device"])
    for name in of_machine:
        facts = [run.header.get("environment", {}).get(name) for run in runs]
        _check_equal(name, facts, HINT)
    _check_distinct(runs)
    rows: dict[tuple[object, ...], list[Result]] = {}
    for run in runs:
        for row in run.rows:
            rows.setdefault((row.case, *row.identity), []).append(row)
    if shards is None:
        return Results(_joined(rows.values()), first.header)
    for group in rows.values():
        _check_equal("machine", [MachineColumns.of(row).machine for row in group], HINT)
    _check_equal("machine kind", list(machines_of(row for run in runs for row in run.rows).values()) or [""], HINT)
    header = header_of_shards(whole, (row for run in runs for row in run.rows))
    return Results(in_order(_joined(rows.values()), header), header)


def _joined(groups: Iterable[Sequence[Result]]) -> list[Result]:
    rows = [join_repeats(group) for group in groups]
    return with_ratios_by_case(rows, reference_of(rows))


def _options(run: Results, is_shard: bool) -> str:
    """Return the options of a run that no row says, in words; shards may be pinned to different processors."""
    settings = {"seed": run.header.get("seed", 0), **(run.header.get(SETTINGS) or {})}
    return ", ".join(f"{name} {value}" for name, value in sorted(settings.items()) if not (is_shard and name == "pin"))


def _check_distinct(runs: Sequence[Results]) -> None:
    """A run that is in it twice would make its times look twice as sure as they are."""
    seen: list[Results] = []
    for run in runs:
        if run.rows and any(list(run.rows) == list(other.rows) for other in seen):
            raise UserError("two of them are the same run", "name each once")
        seen.append(run)


def _check_equal(name: str, values: Sequence[Any], hint: str) -> None:
    other = next((value for value in values if value != values[0]), values[0])
    if other != values[0]:
        raise UserError(f"they have different {name.replace('_', ' ')}: {values[0]} and {other}", hint)
