"""Stand-in for nsys, and reports as `nsys export --type=sqlite` writes them.

Tables have the columns of the documented schema that versions from 2022.4 to 2026 share.
Source: https://docs.nvidia.com/nsight-systems/UserGuide/index.html, "SQLite Schema Reference"
"""

from __future__ import annotations

import json
import sqlite3
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from opgrip.replay.timing.ranges import DOMAIN

PID = 77
THREAD, AUTOGRAD = PID << 24 | 1, PID << 24 | 2

SCHEMA = """
CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE NVTX_EVENTS (start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER,
 category INTEGER, color INTEGER, text TEXT, globalTid INTEGER, endGlobalTid INTEGER, textId INTEGER, domainId INTEGER,
 uint64Value INTEGER, int64Value INTEGER, doubleValue REAL, uint32Value INTEGER, int32Value INTEGER, floatValue REAL,
 jsonTextId INTEGER, jsonText TEXT);
"""
ON_DEVICE = "start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL,"
LAUNCHED = "streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER,"
TABLES = {
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL,"
    " globalTid INTEGER, correlationId INTEGER, nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL,"
    " callchainId INTEGER",
    "CUPTI_ACTIVITY_KIND_KERNEL": f"{ON_DEVICE} {LAUNCHED} demangledName INTEGER NOT NULL, shortName INTEGER NOT NULL,"
    " mangledName INTEGER, gridX INTEGER, gridY INTEGER, gridZ INTEGER, blockX INTEGER, blockY INTEGER,"
    " blockZ INTEGER, graphNodeId INTEGER",
    "CUPTI_ACTIVITY_KIND_MEMCPY": f"{ON_DEVICE} {LAUNCHED} bytes INTEGER NOT NULL, copyKind INTEGER NOT NULL,"
    " srcKind INTEGER, dstKind INTEGER, graphNodeId INTEGER",
    "CUPTI_ACTIVITY_KIND_MEMSET": f"{ON_DEVICE} {LAUNCHED} value INTEGER NOT NULL, bytes INTEGER NOT NULL,"
    " graphNodeId INTEGER, memKind INTEGER",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": f"{ON_DEVICE} {LAUNCHED} graphId INTEGER NOT NULL, graphExecId INTEGER NOT NULL",
}
NAMED_DOMAIN, CATEGORY, RANGE = 75, 33, 60

HELP = """\
\t--cuda-graph-trace=

\t   Possible values are 'graph' or 'node'.
\t   Set the granularity for CUDA graph trace. Applicable only when CUDA tracing is enabled.
"""
STAND_IN = """
import json, os, shutil, sys
from pathlib import Path

folder = Path(__file__).parent
told = json.loads((folder / "told.json").read_text())
words = sys.argv[1:]
if words[:2] == ["profile", "--help"]:
    print(told["help"])
elif words[0] == "profile":
    with open(folder / "log.jsonl", "a") as log:
        log.write(json.dumps(words) + "\\n")
    output = words[words.index("--output") + 1]
    for number, report in enumerate(told["reports"], 1):
        shutil.copy(report, f"{output}.{number}.nsys-rep" if len(told["reports"]) > 1 else f"{output}.nsys-rep")
else:
    shutil.copy(words[-1], next(word for word in words if word.startswith("--output=")).partition("=")[2])
"""


class NsysStandIn:
    """Program with the command line of nsys, which runs nothing and copies given reports."""

    def __init__(self, folder: Path, reports: Sequence[Path], help_text: str = HELP) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.binary, self._log = folder / "nsys", folder / "log.jsonl"
        self.binary.write_text(f"#!{sys.executable}\n{STAND_IN}")
        self.binary.chmod(0o755)
        (folder / "told.json").write_text(json.dumps({"help": help_text, "reports": [str(path) for path in reports]}))

    def calls(self) -> list[list[str]]:
        return [json.loads(line) for line in self._log.read_text().splitlines()]


def write_report(
    path: Path,
    ranges: Sequence[tuple[int, int, str, int]],
    launches: Sequence[tuple[int, int]] = (),
    work: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
) -> Path:
    work = work or {}
    names = [*dict.fromkeys([message for _, _, message, _ in ranges])]
    names += [item["name"] for items in work.values() for item in items if "name" in item]
    with closing(sqlite3.connect(path)) as database:
        database.executescript(SCHEMA)
        database.executemany("INSERT INTO StringIds VALUES (?, ?)", [(names.index(name), name) for name in set(names)])
        insert(database, "NVTX_EVENTS", start=0, eventType=NAMED_DOMAIN, text=DOMAIN, globalTid=THREAD, domainId=3)
        insert(
            database, "NVTX_EVENTS", start=0, eventType=CATEGORY, category=1, text="eager", globalTid=THREAD, domainId=3
        )
        for start, end, message, case in ranges:
            text = {"textId": names.index(message), "category": 1, "globalTid": THREAD, "domainId": 3}
            insert(database, "NVTX_EVENTS", start=start, end=end, eventType=RANGE, int64Value=case, **text)
        if work:
            add_table(database, "RUNTIME")
        for start, number in launches:
            call = {"eventClass": 0, "globalTid": THREAD, "nameId": 0, "returnValue": 0}
            insert(database, "CUPTI_ACTIVITY_KIND_RUNTIME", start=start, end=start + 1, correlationId=number, **call)
        for kind, items in work.items():
            add_table(database, kind)
            for item in items:
                insert(database, f"CUPTI_ACTIVITY_KIND_{kind}", **_whole(kind, item, names))
        database.commit()
    return path


def add_table(database: sqlite3.Connection, kind: str) -> None:
    """Create the CUPTI table whose name ends in `kind`, such as `KERNEL`."""
    name = f"CUPTI_ACTIVITY_KIND_{kind}"
    database.execute(f"CREATE TABLE {name} ({TABLES[name]})")


def insert(database: sqlite3.Connection, table: str, **cells: Any) -> None:
    columns, places = ", ".join(cells), ", ".join("?" * len(cells))
    database.execute(f"INSERT INTO {table} ({columns}) VALUES ({places})", list(cells.values()))


def _whole(kind: str, item: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return the cells of a row for work on the device, with the columns that its kind of work always has."""
    usual: dict[str, dict[str, Any]] = {
        "KERNEL": {},
        "MEMCPY": {"bytes": 0, "copyKind": 8},
        "MEMSET": {"bytes": 0, "value": 0},
        "GRAPH_TRACE": {"graphId": 1, "graphExecId": 1},
    }
    cells = {"deviceId": 0, "contextId": 1, "streamId": 7, "globalPid": PID << 24, **usual[kind], **item}
    name = cells.pop("name", None)
    return cells if name is None else {**cells, "shortName": names.index(name), "demangledName": names.index(name)}
