"""A report of nsys, exported to SQLite: the ranges that opgrip marked, and the work that ran on devices.

Tables: https://docs.nvidia.com/nsight-systems/UserGuide/index.html, "SQLite Schema Reference".
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from opgrip.errors import UserError
from opgrip.replay.timing.ranges import DOMAIN

# values of `eventType` in the table of NVTX events: category name, start/end range, domain name
CATEGORY, RANGE, NAMED_DOMAIN = 33, 60, 75
EVENTS, STRINGS, CALLS = "NVTX_EVENTS", "StringIds", "CUPTI_ACTIVITY_KIND_RUNTIME"
KERNELS, COPIES = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_MEMCPY"
MEMSETS, GRAPHS = "CUPTI_ACTIVITY_KIND_MEMSET", "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
GRAPH_NAME = "CUDA graph"


class DeviceWorkKind(Enum):
    """The kind of a piece of device work; the value is the name of its table in the report."""

    KERNEL = KERNELS
    COPY = COPIES
    MEMSET = MEMSETS
    GRAPH = GRAPHS


@dataclass(frozen=True, slots=True)
class NsysRange:
    """One NVTX range that opgrip marked: a timed run of a row, or a stage before or after the run.

    case : number of the case; -1 if the range has none
    message : operator, or name of the stage
    category : text that distinguishes the rows of a case, such as the mode
    start_ns, end_ns : time since the start of the report
    process : lower 24 bits of the process number
    """

    case: int
    message: str
    category: str
    start_ns: int
    end_ns: int
    process: int


@dataclass(frozen=True, slots=True)
class DeviceWork:
    """A piece of device work: a kernel, a copy, a memset, or a whole CUDA graph.

    start_ns, end_ns : time in which it ran on the device, since the start of the report
    launched_ns : time at which the program launched it, since the start of the report; -1 if unknown
    process : lower 24 bits of the process number
    copied_bytes : size of a copy, else 0
    """

    kind: DeviceWorkKind
    name: str
    start_ns: int
    end_ns: int
    launched_ns: int
    process: int
    copied_bytes: int = 0


@dataclass(frozen=True, slots=True)
class NsysReport:
    spans: Sequence[NsysRange]
    work: Sequence[DeviceWork]


def read_report(path: Path) -> NsysReport:
    """Return opgrip's ranges and the device work in a report, which is an SQLite database."""
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
            database.row_factory = sqlite3.Row
            tables = {row["name"] for row in database.execute("SELECT name FROM sqlite_master")}
            if EVENTS not in tables:
                raise UserError(
                    f"{path} has no table {EVENTS}", "check that this nsys can record NVTX, with --trace=nvtx"
                )
            return NsysReport(list(_spans(database, tables)), list(_work(database, tables)))
    except (sqlite3.Error, IndexError) as error:
        raise UserError(f"{path} is not a known report of nsys: {error}", "use another version of nsys") from error


def _spans(database: sqlite3.Connection, tables: set[str]) -> Iterator[NsysRange]:
    strings = _strings(database, tables)
    categories: dict[Any, str] = {}
    domains: set[Any] = set()
    ranges = []
    for row in database.execute(f"SELECT * FROM {EVENTS} ORDER BY start"):
        event = _Row(row)
        text = event["text"] or strings.get(event["textId"], "")
        process = _process(event["globalTid"])
        if event["eventType"] == NAMED_DOMAIN and text == DOMAIN:
            domains.add((process, event["domainId"]))
        elif event["eventType"] == CATEGORY:
            categories[process, event["domainId"], event["category"]] = text
        elif event["eventType"] == RANGE and event["end"] is not None:
            ranges.append((process, text, event))
    for process, text, event in ranges:
        if (process, event["domainId"]) in domains:
            case = event["int64Value"] if event["int64Value"] is not None else event["uint64Value"]
            category = categories.get((process, event["domainId"], event["category"]), "")
            yield NsysRange(-1 if case is None else case, text, category, event["start"], event["end"], process)


def _work(database: sqlite3.Connection, tables: set[str]) -> Iterator[DeviceWork]:
    if CALLS not in tables:
        return
    start_of_launch = {
        (_process(row["globalTid"]), row["correlationId"]): row["start"]
        for row in database.execute(f"SELECT globalTid, correlationId, start FROM {CALLS}")
    }
    strings = _strings(database, tables)
    traced_launches = set()
    for kind in DeviceWorkKind:
        if kind.value not in tables:
            continue
        for row in database.execute(f"SELECT * FROM {kind.value} ORDER BY start"):
            activity = _Row(row)
            launch = (_process(activity["globalPid"]), activity["correlationId"])
            if kind is DeviceWorkKind.GRAPH and launch in traced_launches:
                continue
            traced_launches.add(launch)
            short, whole = activity["shortName"], activity["demangledName"]
            name = GRAPH_NAME if kind is DeviceWorkKind.GRAPH else strings.get(whole if short is None else short, "")
            copied = int(activity["bytes"] or 0) if kind is DeviceWorkKind.COPY else 0
            launched = start_of_launch.get(launch, -1)
            yield DeviceWork(kind, name, activity["start"], activity["end"], launched, launch[0], copied)


def _strings(database: sqlite3.Connection, tables: set[str]) -> dict[Any, str]:
    if STRINGS not in tables:
        return {}
    return {row["id"]: row["value"] for row in database.execute(f"SELECT id, value FROM {STRINGS}")}


def _process(number: int | None) -> int:
    return -1 if number is None else (number >> 24) & 0xFFFFFF


class _Row:
    def __init__(self, row: sqlite3.Row) -> None:
        self._row, self._names = row, set(row.keys())

    def __getitem__(self, name: str) -> Any:
        return self._row[name] if name in self._names else None
