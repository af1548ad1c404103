"""The results store, a folder with one file per replay, and merging of runs."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from opgrip.cli.output_files import cannot_be_written
from opgrip.errors import UserError, cause_of
from opgrip.replay.reports.cells import OPTIONS
from opgrip.replay.reports.comparison.unpaired_ratio import weights_of
from opgrip.replay.reports.outcome import Results, is_interrupted, write_results
from opgrip.replay.results.origins import MachineColumns, names_of
from opgrip.replay.results.paired_ratio import with_joined_pairs
from opgrip.replay.results.ratios import reference_of, with_ratios_by_case
from opgrip.replay.results.results import NOISY, OK, RAN, SETTINGS, WRONG, Result, rate_of
from opgrip.replay.run.request import MOST_SHARDS
from opgrip.replay.timing.samples import FEWEST_FOR_PERCENTILES, effective_runs, quantile

VARIABLE = "OPGRIP_STORE"  # environment variable with the folder of the store
LATEST = re.compile(r"latest(?:~(\d+))?")  # name of the newest run of a store, or of an earlier one (`latest~1`)
DAMAGED = "(damaged)"
_OWN_NAME = re.compile(r"\d{8}T\d{9}-.+-[0-9a-f]{6}")  # names of runs that `Store.keep` wrote
_UNFIT = re.compile(r"[^A-Za-z0-9._]+")
_LEAST_OF_ID = 3


@dataclass(frozen=True, slots=True)
class RunSummary:
    time: str = ""
    trace: str = ""
    device: str = ""
    torch: str = ""
    machine: str = ""
    modes: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    cases: int = 0
    ok: int = 0


@dataclass(frozen=True, slots=True)
class StoredRun:
    path: Path

    @property
    def name(self) -> str:
        return self.path.stem

    def load(self) -> Results:
        return Results.load(self.path)

    def summary(self) -> RunSummary:
        try:
            return summary_of(self.load())
        except UserError:
            return RunSummary(trace=DAMAGED)


class Store:
    """A folder in which results of replays are kept; it need not exist yet."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or usual_folder()

    @property
    def folder(self) -> Path:
        if self._folder is None:
            raise UserError("no folder of results is set", f"name one with --store, or set ${VARIABLE}")
        return self._folder

    def keep(self, rows: Sequence[Result], header: dict[str, Any]) -> Path:
        environment, accelerators = header.get("environment", {}), header.get("accelerator", {}).get("devices", {})
        names = [str(facts["name"]) for facts in accelerators.values() if "name" in facts]
        device = names[0] if names else str(header.get("device", "cpu")).partition(":")[0]
        folder = self.folder / f"{_slug(str(environment.get('machine', 'machine')))}-{_slug(device)}"
        moment = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%S%f")[:-3]
        # this import loads torch, which listing runs does not need
        from opgrip.replay.cases.sources.operator import PREFIX, name_of_target

        target = str(header.get("trace", "results"))
        trace = name_of_target(target) if target.startswith(PREFIX) else Path(target).name.partition(".")[0]
        path = folder / f"{moment}-{_slug(trace)}-{secrets.token_hex(3)}.parquet"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise cannot_be_written(path, error) from error
        write_results(rows, header, path, force=False)
        return path

    def runs(self) -> list[StoredRun]:
        paths = self._folder.glob("*/*") if self._folder is not None else ()
        runs = (StoredRun(path) for path in paths if path.suffix in (".json", ".parquet") and path.is_file())
        return sorted(runs, key=lambda run: (run.name, str(run.path)))

    def prune(self, keep: int) -> list[StoredRun]:
        removed = [run for run in self.runs() if _OWN_NAME.fullmatch(run.name)][:-keep]
        try:
            for run in removed:
                run.path.unlink()
        except OSError as error:
            raise UserError(f"a run in {self.folder} cannot be removed", cause_of(error)) from error
        return removed

    def holds(self, name: str) -> bool:
        return LATEST.fullmatch(name) is not None or (not _holds(Path.is_file, name) and bool(self._named(name)))

    def find(self, name: str) -> Path:
        """Return the path of the run that `name` refers to.

        name : path, name of a run, unique beginning or end of a name, `latest`, or `latest~1` for the run before it
        """
        if _holds(Path.is_file, name):
            return Path(name)
        match = LATEST.fullmatch(name)
        if match is not None:
            runs = self.runs()
            index = int(match[1] or 0)
            if index < len(runs):
                return runs[-1 - index].path
            raise UserError(
                f"{self.folder} has no run {name}; its number of runs is {len(runs)}", "see opgrip results list"
            )
        matches = self._named(name)
        if len(matches) == 1:
            return matches[0].path
        if matches:
            raise UserError(
                f"{name!r} names {len(matches)} runs, such as {matches[0].name}", ("write a longer part of its name")
            )
        if _holds(is_interrupted, name):
            problem = f"the replay that writes {name} has not finished"
            raise UserError(problem, "wait for it, or continue it with opreplay ... --resume if it was interrupted")
        place = self._folder or f"a folder that --store or ${VARIABLE} names"
        raise UserError(f"{name} is neither a file nor a run in {place}", "see opgrip results list")

    def _named(self, name: str) -> list[StoredRun]:
        if len(name) < _LEAST_OF_ID:
            return []
        runs = self.runs()
        exact = [run for run in runs if run.name == name]
        return exact or [run for run in runs if run.name.startswith(name) or run.name.endswith(name)]


def summary_of(results: Results) -> RunSummary:
    header, rows = results.header, results.rows
    return RunSummary(
        time=str(header.get("time", "")),
        trace=str(header.get("trace", "")),
        device=str(header.get("device", "")),
        torch=str(header.get("torch", "")),
        machine=str((header.get("environment") or {}).get("machine", "")),
        modes=tuple(dict.fromkeys(f"{row.mode} (tune {row.tune})" if row.tune else row.mode for row in rows)),
        dtypes=tuple(dict.fromkeys(row.dtype for row in rows if row.dtype)),
        cases=len({row.case_of_trace for row in rows}),
        ok=sum(row.status == OK for row in rows),
    )


def usual_folder() -> Path | None:
    name = os.environ.get(VARIABLE)
    return Path(name).expanduser() if name else None


def _holds(question: Callable[[Path], bool], name: str) -> bool:
    try:
        return question(Path(name))
    except (OSError, ValueError):
        # the name is too long or invalid, or a folder is not readable
        return False


def _slug(text: str) -> str:
    return _UNFIT.sub("-", text).strip("-.")[:60] or "unnamed"


SHARD = "shard"  # header field of the shards in a file: `3/16`, or `1,2,5/16` for several; absent for a complete run


def shards_in(runs: Sequence[Results]) -> tuple[list[int], int] | None:
    """Return the shard numbers that the runs contain, and the replay's number of shards; None if a run is not a
    shard.
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
            raise UserError(
                f"a file is from shard {run.header[SHARD]}, which is not a valid shard", "make that file again"
            )
    if len({run.header[OPTIONS] for run in runs if isinstance(run.header.get(OPTIONS), str)}) > 1:
        # with different options some cases may be in several shards and others in none
        raise UserError("the files are shards of replays with different options", "give the same options to all")
    if len(counts) != 1:
        parts = " and ".join(map(str, sorted(counts)))
        raise UserError(
            f"the files are from replays that were split differently, into {parts} shards",
            "merge the shards of one replay",
        )
    return numbers, counts.pop()


def missing_shards(header: Mapping[str, Any]) -> list[int]:
    shards = shards_in([Results([], dict(header))])
    return [] if shards is None else sorted({*range(1, shards[1] + 1)} - {*shards[0]})


def header_of_shards(runs: Sequence[Results], rows: Iterable[Result]) -> dict[str, Any]:
    shards = shards_in(runs)
    assert shards is not None, "the caller passes only shards"
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
    about = (MachineColumns.of(row) for row in rows)
    return {item.machine: item.machine_kind or "" for item in about if item.machine is not None}


def in_order(rows: Iterable[Result], header: Mapping[str, Any]) -> list[Result]:
    order = {name: index for index, name in enumerate(header.get("traces", {}))}
    return sorted(rows, key=lambda row: (order.get(row.trace, len(order)), -(row.share or 0.0), row.case))


def _traces(headers: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    traces: dict[str, Any] = {}
    for header in headers:
        for name, about in header.items():
            if isinstance(about, Mapping):
                traces[name] = {**traces.get(name, {}), **about}
    return traces


# header fields that must be equal in merged runs, with a hint for the case that they are not
EQUAL = {
    "trace_hash": "replay one trace",
    "device": "compare them instead: opgrip compare",
    "torch": "compare them instead: opgrip compare",
}
OF_MACHINE = ("machine", "processor", "governor", "threads")  # environment fields that must be equal in merged runs
HINT = "times of different machines cannot be merged: compare them with opgrip compare"


def merge_runs(runs: Sequence[Results]) -> Results:
    """Return the rows of all runs as one run; rows of the same case and variant become repeats of one row."""
    shards = shards_in(runs)
    of_machine = OF_MACHINE if shards is None else [name for name in OF_MACHINE if name != "machine"]
    if shards is not None:
        # a shard without cases cannot conflict with others
        _check_distinct(runs)
        whole, runs = runs, [run for run in runs if run.rows] or runs[:1]
    first = runs[0]
    if not any(run.header for run in runs):
        raise UserError(
            "these files do not contain the facts that identify what was timed", "merge .json or .parquet files"
        )
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
            rows.setdefault((row.case, *row.identity_without()), []).append(row)
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
    # without `pin` for shards, which may use different CPUs
    settings = {"seed": run.header.get("seed", 0), **(run.header.get(SETTINGS) or {})}
    return ", ".join(f"{name} {value}" for name, value in sorted(settings.items()) if not (is_shard and name == "pin"))


def _check_distinct(runs: Sequence[Results]) -> None:
    earlier_runs: list[Results] = []
    for run in runs:
        if run.rows and any(list(run.rows) == list(other.rows) for other in earlier_runs):
            raise UserError("two of the files are the same run", "name each once")
        earlier_runs.append(run)


def _check_equal(name: str, values: Sequence[Any], hint: str) -> None:
    other = next((value for value in values if value != values[0]), values[0])
    if other != values[0]:
        raise UserError(f"the files differ in {name.replace('_', ' ')}: {values[0]} and {other}", hint)


def join_repeats(rows: Sequence[Result]) -> Result:
    # wrong rows are worse than others, those with the largest error worst
    bad = max(
        (row for row in rows if row.status not in RAN),
        key=lambda row: (row.status == WRONG, row.max_abs or 0.0),
        default=None,
    )
    if bad is not None or len(rows) == 1:
        return bad or rows[0]
    errors: dict[str, Any] = {
        name: max((error for row in rows if (error := getattr(row, name)) is not None), default=None)
        for name in ("max_abs", "max_rel")
    }
    rows = [row for row in rows if row.status == OK] or rows
    first, times = rows[0], [time for row in rows for time in row.times_us or ()]
    if not times:
        return replace(first, **errors)
    repeats = [count for row in rows for count in row.repeats or [len(row.times_us or ())]]
    weights = [weight * len(row.repeats or (1,)) / len(repeats) for row in rows for weight in weights_of(row)]
    kinds = [kind for row in rows for kind in row.kinds or [0] * len(row.times_us or ())]
    p10, low, middle, high, p90 = (quantile(times, weights, share) for share in (0.1, 0.25, 0.5, 0.75, 0.9))
    spread, runs = (high - low) / middle if middle else None, effective_runs(weights)
    ratios: dict[str, Any] = {
        name: median(figures)
        if (figures := [value for row in rows if (value := getattr(row, name)) is not None])
        else None
        for name in ("ratio_p10", "ratio_p50", "ratio_p90")
    }
    known_rates = [row.memory_gb_per_s for row in rows if row.memory_gb_per_s]
    joined = replace(
        first,
        median_us=middle,
        p10_us=p10 if runs >= FEWEST_FOR_PERCENTILES else None,
        p90_us=p90 if runs >= FEWEST_FOR_PERCENTILES else None,
        mean_us=float(np.average(times, weights=weights)),
        samples=len(times),
        runs=runs,
        spread=spread,
        noisy=None if spread is None else spread > NOISY,
        dropped=sum(row.dropped for row in rows),
        slowed=fmean(row.slowed or 0.0 for row in rows),
        memory_gb_per_s=fmean(known_rates) if known_rates else None,
        gflop_per_s=rate_of(first.flops, middle) if first.status == OK else None,
        gb_per_s=rate_of(first.bytes_moved, middle) if first.status == OK else None,
        times_us=times,
        weights=weights,
        kinds=kinds if any(kinds) else None,
        repeats=repeats,
        ratio=None,
        **ratios,
        **errors,
    )
    return with_joined_pairs(joined, rows)
