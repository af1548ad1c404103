"""Reduce profilers' reports to the parts that opgrip reads, without names of machines, for tests elsewhere."""

from __future__ import annotations

import csv
import io
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from opgrip.replay.analyses.ncu.ncu import PLACES as NCU_PLACES
from opgrip.replay.analyses.ncu.ncu import TO_CSV
from opgrip.replay.analyses.nsys import CALLS, EVENTS, STRINGS, DeviceWorkKind
from opgrip.replay.analyses.nsys import PLACES as NSYS_PLACES
from opgrip.replay.analyses.profiler_programs import find_program

NSYS, NCU = "nsys", "ncu"
PRODUCTS = {NSYS: "Nsight Systems", NCU: "Nsight Compute"}
PLACES = {NSYS: NSYS_PLACES, NCU: NCU_PLACES}
SUFFIXES = {NSYS: ".sqlite", NCU: ".csv"}
MOST_BYTES = 4 << 20  # largest report to send
HOSTS = ("Process Name", "Host Name")


def find_binary(profiler: str) -> str:
    """Return the path of a profiler; raises `UserError` if there is none."""
    return find_program(profiler, PRODUCTS[profiler], PLACES[profiler])


def keep_small(profiler: str, folder: Path) -> None:
    """Write a reduced copy of the profiler's report in a folder into the same folder; raise an error if that fails."""
    (_keep_ncu if profiler == NCU else _keep_nsys)(folder)


def small_reports(folder: Path) -> Iterator[Path]:
    """Yield the files of the reduced reports below a folder, each followed by the file of its replay's rows."""
    for profiler, suffix in SUFFIXES.items():
        for report in folder.glob(f"*/{profiler}{suffix}"):
            rows = report.with_suffix(".json")
            if rows.exists() and report.stat().st_size + rows.stat().st_size <= MOST_BYTES:
                yield report
                yield rows


def _keep_ncu(folder: Path) -> None:
    report = sorted(folder.glob("ncu.batch*.ncu-rep"))[0]
    command = [find_binary(NCU), f"--import={report}", *TO_CSV]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = list(csv.reader(io.StringIO(text[text.index('"ID"') :])))
    hidden = [place for place, name in enumerate(rows[0]) if name in HOSTS]
    with (folder / "ncu.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, quoting=csv.QUOTE_ALL)
        for number, row in enumerate(rows):
            writer.writerow(["" if number and place in hidden else cell for place, cell in enumerate(row)])


def _keep_nsys(folder: Path) -> None:
    whole = folder / "whole.sqlite"
    command = [find_binary(NSYS), "export", "--type=sqlite", f"--output={whole}", str(folder / "nsys.nsys-rep")]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    cut(whole, folder / "nsys.sqlite")


def cut(whole: Path, excerpt: Path) -> None:
    """Copy the tables of the exported report `whole` that opgrip reads, and strings that they use, to `excerpt`."""
    with closing(sqlite3.connect(whole)) as database:
        database.execute("ATTACH ? AS excerpt", (str(excerpt),))
        there = {name for (name,) in database.execute("SELECT name FROM main.sqlite_master WHERE type = 'table'")}
        named = []
        for table in {EVENTS, CALLS, *(kind.value for kind in DeviceWorkKind)} & there:
            database.execute(f"CREATE TABLE excerpt.{table} AS SELECT * FROM main.{table}")
            columns = {row[1] for row in database.execute(f"PRAGMA main.table_info({table})")}
            strings = {"textId", "shortName", "demangledName", "nameId"} & columns
            named += [f"SELECT {column} FROM main.{table}" for column in strings]
        if STRINGS in there and named:
            id_query = " UNION ".join(named)
            database.execute(f"CREATE TABLE excerpt.{STRINGS} AS SELECT * FROM main.{STRINGS} WHERE id IN ({id_query})")
        database.commit()
