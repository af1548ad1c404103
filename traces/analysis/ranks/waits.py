"""Waiting times of ranks: how long each rank computed, ran collectives, and waited for the last rank to arrive."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from opgrip.errors import UserError
from opgrip.traces.analysis.ranks.alignment import UNKNOWN, Meetings, Scan, SignatureKinds, is_ambiguous, match, rank_of
from opgrip.traces.analysis.ranks.collectives import FROM_ROOT, TO_ROOT, Collective
from opgrip.traces.codec.call_blocks import CallBlock
from opgrip.traces.io.reader import TraceReader
from opgrip.traces.schema.records import FUNCTION, Header, Scope, Signature, Thread
from opgrip.traces.table.call_source import NumberSet
from opgrip.traces.table.profiler_labels import is_mark

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RankWaits:
    """Tables of the times that ranks of a merged trace waited for each other in collectives."""

    ranks: pd.DataFrame
    pairs: pd.DataFrame
    places: pd.DataFrame
    unmatched: int

    def as_json(self) -> dict[str, Any]:
        tables = {name: getattr(self, name).to_dict("records") for name in ("ranks", "pairs", "places")}
        return {**tables, "unmatched": self.unmatched}


def find_waits(path: Path, partial: bool = False, unbounded: bool = False) -> RankWaits:
    reader = TraceReader(path, unbounded)
    ranks = _read(reader)
    if reader.missing and not partial:
        raise UserError(reader.missing, "read it with --partial")
    ranks.drop_others()
    if len(ranks.processes) < 2:
        hint = "join the traces of its ranks with opgrip trace merge"
        raise UserError(f"{path} has the calls of only one process", hint)
    meetings = ranks.match()
    if not len(meetings):
        raise UserError(f"{path} contains no collective in which several ranks took part", "see opgrip trace info")
    return _waits(ranks, meetings)


@dataclass(slots=True)
class _Process:
    scan: Scan
    calls: int = 0
    compute_ns: int = 0
    first_ns: int | None = None
    last_ns: int = 0
    scopes: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Ranks:
    kinds: SignatureKinds = field(default_factory=SignatureKinds)
    processes: dict[int, _Process] = field(default_factory=dict)
    headers: list[Mapping[str, Any]] = field(default_factory=list)
    process_of: dict[int, int] = field(default_factory=dict)
    # signatures of labels and of functions whose inner calls are recorded; those that compute nothing, which are also
    # collectives and waits
    uncounted: NumberSet = field(default_factory=NumberSet)
    idle: NumberSet = field(default_factory=NumberSet)
    inner: NumberSet = field(default_factory=NumberSet)  # scopes of calls inside a function that is counted as one call
    scopes: dict[int, Scope] = field(default_factory=dict)

    def names(self) -> list[int]:
        ranks = [rank_of(header) for header in self.headers]
        return [process if rank is None else rank for process, rank in enumerate(ranks)]

    def drop_others(self) -> None:
        ranks = [rank_of(header) for header in self.headers]
        if is_ambiguous(ranks):
            raise UserError("two processes of the trace have the same rank", "merge only traces of one program")
        if any(rank is not None for rank in ranks):
            self.processes = {number: item for number, item in self.processes.items() if ranks[number] is not None}

    def match(self) -> Meetings:
        events = {process: item.scan.events() for process, item in sorted(self.processes.items())}
        return match(events, dict.fromkeys(events, self.kinds.collectives), self.names())

    def add(self, block: CallBlock) -> None:
        if not len(block):
            return
        number = self.process_of.get(block.thread, 0)
        process = self.processes.setdefault(number, _Process(Scan(self.kinds)))
        process.scan.add(block)
        is_inner = self.inner.flags(block.scope)
        process.calls += int((~self.uncounted.flags(block.signature) & ~is_inner).sum())
        start, end = int(block.start_ns.min()), int((block.start_ns + block.duration_ns).max())
        process.last_ns = end if process.first_ns is None else max(process.last_ns, end)
        process.first_ns = start if process.first_ns is None else min(process.first_ns, start)
        computes = ~self.idle.flags(block.signature) & ~is_inner
        times = block.duration_ns
        if len(block.device_ns):
            times = np.where(block.device_ns >= 0, block.device_ns, times)
        process.compute_ns += int(times[computes].sum())
        is_collective = self.kinds.numbers.flags(block.signature)
        numbers, places = np.unique(block.signature[is_collective], return_index=True)
        for collective, scope in zip(numbers.tolist(), block.scope[is_collective][places].tolist(), strict=True):
            process.scopes.setdefault(collective, scope)


def _read(reader: TraceReader) -> _Ranks:
    ranks = _Ranks()
    for record in reader.columns():
        match record:
            case Header():
                entries = record.fields.get("processes")
                ranks.headers = (
                    [item if isinstance(item, dict) else {} for item in entries] if isinstance(entries, list) else [{}]
                )
            case Signature():
                ranks.kinds.add(record)
                is_collective = record.number in ranks.kinds.collectives or record.number in ranks.kinds.waits
                is_uncounted = is_mark(record.op) or record.kind == FUNCTION
                if is_uncounted:
                    ranks.uncounted.put(record.number)
                if is_collective or is_uncounted:
                    ranks.idle.put(record.number)
            case Scope():
                ranks.scopes[record.number] = record
                if record.inside is not None and not record.gripped:
                    ranks.inner.put(record.number)
            case Thread():
                is_known = record.process is not None and 0 <= record.process < len(ranks.headers)
                ranks.process_of[record.number] = (record.process or 0) if is_known else 0
            case CallBlock():
                ranks.add(record)
    return ranks


@dataclass(frozen=True, slots=True)
class _Times:
    rank: Integers
    waiting_ns: Integers
    inside_ns: Integers
    is_last: NDArray[np.bool_]
    last_rank: Integers


def _waits(ranks: _Ranks, meetings: Meetings) -> RankWaits:
    times = _times(meetings, np.array(ranks.names(), dtype=np.int64))
    frame = pd.DataFrame(
        {
            "rank": times.rank,
            "waits_for": times.last_rank,
            "waiting_ns": times.waiting_ns,
            "inside_ns": times.inside_ns,
            "is_last": times.is_last,
            "unknown": meetings.end_ns == UNKNOWN,
            "number": meetings.number,
        }
    )
    pairs = (
        frame[frame["waiting_ns"] > 0].groupby(["rank", "waits_for"], as_index=False)["waiting_ns"].agg(["size", "sum"])
    )
    pairs = pairs.rename(columns={"size": "collectives"}).assign(waiting_ms=pairs["sum"] / 1e6).drop(columns="sum")
    pairs = pairs.sort_values("waiting_ms", ascending=False, ignore_index=True)
    return RankWaits(_by_rank(ranks, frame), pairs, _by_place(ranks, meetings, frame), meetings.unmatched)


def _times(meetings: Meetings, names: Integers) -> _Times:
    number = meetings.number
    kind_names = np.array(meetings.kinds)
    of_root = meetings.process == meetings.root
    from_root = np.isin(kind_names, FROM_ROOT)[meetings.kind] & (meetings.root >= 0)
    to_root = np.isin(kind_names, TO_ROOT)[meetings.kind] & (meetings.root >= 0)
    # the members that others wait for: all, or only the root
    counts = ~from_root | of_root
    start = np.where(counts, meetings.start_ns, np.iinfo(np.int64).min)
    latest = np.maximum.reduceat(start, meetings.first)
    is_last = (start == latest[number]) & counts
    # choose one of several at the same time
    last_row = np.minimum.reduceat(np.where(is_last, np.arange(len(number)), len(number)), meetings.first)
    # a collective without the trace of its root
    is_known = last_row < len(number)
    last_row = np.minimum(last_row, len(number) - 1)
    last_process = meetings.process[last_row]
    waits = (~to_root | of_root) & (~from_root | ~of_root) & is_known[number] & (meetings.end_ns != UNKNOWN)
    at_once = meetings.wait_ns == meetings.launched_ns
    ready = np.where(at_once, meetings.start_ns, meetings.wait_ns)
    waiting = np.where(waits, np.clip(np.minimum(latest[number], meetings.end_ns) - ready, 0, None), 0)
    waiting = np.where(meetings.process == last_process[number], 0, waiting)
    launch = meetings.launched_ns - meetings.start_ns
    inside = launch + np.where(meetings.end_ns != UNKNOWN, meetings.end_ns - meetings.wait_ns, 0)
    is_last_row = np.zeros(len(number), dtype=np.bool_)
    is_last_row[last_row[is_known]] = True
    return _Times(names[meetings.process], waiting, inside, is_last_row, names[last_process[number]])


def _by_rank(ranks: _Ranks, frame: pd.DataFrame) -> pd.DataFrame:
    names = ranks.names()
    own = frame.groupby("rank").agg(
        collectives=("number", "size"),
        collective_ms=("inside_ns", lambda column: column.sum() / 1e6),
        waiting_ms=("waiting_ns", lambda column: column.sum() / 1e6),
        last=("is_last", "sum"),
        unknown=("unknown", "sum"),
    )
    caused = frame.groupby("waits_for")["waiting_ns"].sum() / 1e6
    rows = [
        {
            "rank": names[number],
            "process": number,
            "calls": process.calls,
            "span_ms": (process.last_ns - (process.first_ns or 0)) / 1e6,
            "compute_ms": process.compute_ns / 1e6,
        }
        for number, process in sorted(ranks.processes.items())
    ]
    table = pd.DataFrame(rows).join(own, on="rank").join(caused.rename("caused_ms"), on="rank")
    table = table.fillna({"collective_ms": 0.0, "waiting_ms": 0.0, "caused_ms": 0.0})
    counts = ["collectives", "last", "unknown"]
    table[counts] = table[counts].fillna(0).astype("int64")
    table["share"] = table["waiting_ms"] / table["span_ms"].where(table["span_ms"] > 0, 1.0)
    first = ["rank", "process", "calls", "span_ms", "compute_ms", "collectives", "collective_ms", "waiting_ms", "share"]
    return table[[*first, "last", "caused_ms", "unknown"]].sort_values("rank", ignore_index=True)


PLACE = ["kind", "group", "ranks", "size_bytes", "function", "file", "line"]


def _by_place(ranks: _Ranks, meetings: Meetings, frame: pd.DataFrame) -> pd.DataFrame:
    whole = frame.groupby("number").agg(waiting_ns=("waiting_ns", "sum"), longest_ns=("waiting_ns", "max"))
    last = frame[frame["is_last"]].drop_duplicates("number").set_index("number")["rank"]
    facts = [_facts(ranks, int(meetings.process[row]), int(meetings.signature[row])) for row in meetings.first.tolist()]
    table = pd.DataFrame(facts, columns=PLACE).join(whole).assign(slowest=last)
    groups = table.groupby(PLACE, sort=False, dropna=False)
    places = groups.agg(
        collectives=("waiting_ns", "size"),
        waiting_ms=("waiting_ns", lambda column: column.sum() / 1e6),
        longest_ms=("longest_ns", lambda column: column.max() / 1e6),
        slowest=("slowest", lambda column: -1 if column.isna().all() else int(column.mode().iloc[0])),
        last=("slowest", lambda column: int(column.value_counts().max()) if column.notna().any() else 0),
    )
    return places.reset_index().sort_values("waiting_ms", ascending=False, ignore_index=True)


def _facts(ranks: _Ranks, process: int, signature: int) -> tuple[Any, ...]:
    collective: Collective = ranks.kinds.collectives[signature]
    scope = ranks.scopes.get(ranks.processes[process].scopes.get(signature, -1))
    place = ("", "", 0) if scope is None else (scope.function, scope.file, scope.line)
    return (collective.kind, collective.group, len(collective.ranks), collective.size_bytes, *place)
