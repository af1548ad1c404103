"""Make one run of several: parts, shards or repeats of a replay."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from opgrip.errors import UserError
from opgrip.replay.outcome import Results
from opgrip.replay.reports.completed import OPTIONS
from opgrip.replay.results.origins import MachineColumns, names_of
from opgrip.replay.results.ratios import reference_of, with_ratios_by_case
from opgrip.replay.results.repeats import join_repeats
from opgrip.replay.results.results import SETTINGS, Result
from opgrip.replay.run.shards import MOST_SHARDS

SHARD = "shard"
"""What a header says of the parts that it is of: `3/16`, or `1,2,5/16` of several; nothing where that is all."""


def shards_in(runs: Sequence[Results]) -> tuple[list[int], int] | None:
    """The numbers of the shards that runs are of, and how many there are; None where a run is none.

    Raises
    ------
    UserError : where they are of splits into other numbers of shards, were made with other options, or are of shards
        that there cannot be
    """
    numbers: list[int] = []
    counts = set()
    for run in runs:
        match = re.fullmatch(r"([0-9]{1,7}(?:,[0-9]{1,7})*)/([0-9]{1,7})", str(run.header.get(SHARD, "")))
        if match is None:
            return None
        numbers.extend(map(int, match[1].split(",")))
        counts.add(int(match[2]))
        if not all(1 <= number <= int(match[2]) <= MOST_SHARDS for number in map(int, match[1].split(","))):
            raise UserError(f"a file says that it is shard {run.header[SHARD]}", "replay that shard again")
    if len({run.header[OPTIONS] for run in runs if isinstance(run.header.get(OPTIONS), str)}) > 1:
        # some cases may be in several of them, and others in none
        raise UserError("they are shards of replays with different options", "give the same options to all")
    if len(counts) != 1:
        parts = " and of ".join(map(str, sorted(counts)))
        raise UserError(f"they are shards of {parts}", "merge those of one replay")
    return numbers, counts.pop()


def missing_shards(header: Mapping[str, Any]) -> list[int]:
    """The numbers of those that a merged run lacks."""
    shards = shards_in([Results([], dict(header))])
    return [] if shards is None else sorted({*range(1, shards[1] + 1)} - {*shards[0]})


def header_of_shards(runs: Sequence[Results], rows: Iterable[Result]) -> dict[str, Any]:
    """What shards say together: what is the same in all, and of machines and traces what each says."""
    shards = shards_in(runs)
    assert shards is not None, "they are shards"
    numbers, count = sorted({*shards[0]}), shards[1]
    filled = [run.header for run in runs if run.rows] or [runs[0].header]
    header = {name: value for name, value in filled[0].items() if name != SHARD}
    if len(numbers) < count:
        header[SHARD] = f"{','.join(map(str, numbers))}/{count}"
    header["time"] = min(str(one.get("time", "")) for one in filled)
    environments = [one.get("environment", {}) for one in filled]
    common = {name: value for name, value in environments[0].items() if all(value == e.get(name) for e in environments)}
    machines = machines_of(rows) or {str(one.get("machine", "")): "" for one in environments}
    header["environment"] = {**common, "machine": names_of(machines)}
    header["machines"] = machines
    if "traces" in header:
        header["traces"] = _traces([one["traces"] for one in (run.header for run in runs) if "traces" in one])
    return header


def machines_of(rows: Iterable[Result]) -> dict[str, str]:
    """The kinds of machines that rows say that they were measured on, by name."""
    about = (MachineColumns.of(row) for row in rows)
    return {item.machine: item.machine_kind or "" for item in about if item.machine is not None}


def in_order(rows: Iterable[Result], header: Mapping[str, Any]) -> list[Result]:
    """Rows as one replay has them: trace by trace, by falling share of time, the rows of a case together."""
    places = {name: place for place, name in enumerate(header.get("traces", {}))}
    return sorted(rows, key=lambda row: (places.get(row.trace, len(places)), -row.share, row.case))


def _traces(headers: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What is said of each trace; a problem that one shard met stays."""
    traces: dict[str, Any] = {}
    for header in headers:
        for name, about in header.items():
            if isinstance(about, Mapping):
                traces[name] = {**traces.get(name, {}), **about}
    return traces


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
