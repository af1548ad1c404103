"""Everything of a replay that needs a GPU, by one command: ways to time, caches, graphs, profilers and the roofline.

    python benchmarks/gpu_check.py                 # captures the built-in detector on the GPU first
    python benchmarks/gpu_check.py --shipped       # replays the trace that ships, as it was captured on a CPU

It prints a table of what worked, and keeps small raw reports in tests/data/gpu, which tests parse on machines without a
GPU. What is not installed is left out, with the reason. Where opgrip is not installed, run pip install --no-deps -e .
first.
"""

from __future__ import annotations

import argparse
import csv
import io
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch
from rich.console import Console
from rich.table import Table

from opgrip.replay import load_results
from opgrip.replay.analyses.ncu.ncu import PLACES as NCU_PLACES
from opgrip.replay.analyses.ncu.report import TO_CSV
from opgrip.replay.analyses.nsys.nsys import PLACES as NSYS_PLACES
from opgrip.replay.analyses.nsys.report import CALLS, EVENTS, STRINGS, Kind
from opgrip.replay.analyses.profiling.programs import find_program
from opgrip.replay.timing.ranges import check_ranges
from opgrip.traces.errors import UserError

ROOT = Path(__file__).resolve().parent.parent
REPORTS_FOLDER = ROOT / "tests/data/gpu"
START = "import sys; from opgrip.{room}.{name} import main; sys.exit(main())"
MOST_BYTES = 1 << 20
"""Of a report that is kept."""
HOSTS = ("Process Name", "Host Name")


@dataclass(frozen=True, slots=True)
class Step:
    """A replay that is tried.

    Attributes
    ----------
    options : of opreplay
    needs : the profiler that it needs; empty for none
    columns : of the results, of which their sum or mean stands in the table
    """

    name: str
    options: tuple[str, ...]
    needs: str = ""
    columns: tuple[str, ...] = ("median_us",)


STEPS = (
    Step("discrete", ()),
    Step("events", ("--exec-mode", "events")),
    Step("graph", ("--exec-mode", "graph")),
    Step("cold", ("--exec-mode", "events", "--cache", "cold")),
    Step("profile", ("--profile",)),
    Step("nsys", ("--nsys",), "nsys", ("nsys_launches", "nsys_gpu_us", "nsys_gap_us")),
    Step("ncu", ("--ncu", "--ncu-iterations", "2"), "ncu", ("ncu_launches", "ncu_us", "ncu_dram_bytes")),
    Step("roofline", ("--roofline",)),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shipped", action="store_true", help="replay the trace that ships, not a new one")
    parser.add_argument("--top", default="20", help="cases with the largest share of time (default: %(default)s)")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("there is no GPU here: nothing is checked")
        return
    table = Table("step", "status", "cases ok", "seconds", "found", title=torch.cuda.get_device_name())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trace = ROOT / "traces/faster_rcnn.jsonl" if args.shipped else _capture(folder / "detector.jsonl")
        for step in STEPS:
            table.add_row(step.name, *_run_step(step, trace, folder, args.top))
        _keep(folder)
    Console().print(table)


def _capture(trace: Path) -> Path:
    done = _run("capture", "opcapture", "--device", "cuda", "-o", str(trace))
    if done.returncode:
        sys.exit(f"the capture failed: {done.stderr.strip()}")
    return trace


def _run_step(step: Step, trace: Path, folder: Path, top: str) -> tuple[str, str, str, str]:
    output = folder / f"{step.name}.json"
    missing = _missing(step.needs)
    if missing:
        return f"left out: {missing}", "-", "-", ""
    began = perf_counter()
    done = _run("replay", "opreplay", str(trace), "--device", "cuda", "--top", top, *step.options, "-o", str(output))
    took = f"{perf_counter() - began:.0f}"
    lines = done.stderr.strip().splitlines() or [""]
    if done.returncode:
        return f"failed: {lines[-1]}", "-", took, ""
    rows = load_results(output)
    sums = [f"{name} {rows[name].sum():,.1f}" for name in step.columns if name in rows]
    return "done", f"{(rows['status'] == 'ok').sum()} of {len(rows)}", took, ", ".join(sums)


def _missing(profiler: str) -> str:
    """Why a profiler cannot be used; empty where it can."""
    try:
        if profiler:
            find_program(profiler, profiler, NSYS_PLACES if profiler == "nsys" else NCU_PLACES)
            check_ranges(profiler)
    except UserError as error:
        return str(error)
    return ""


def _run(room: str, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", START.format(room=room, name=name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _keep(folder: Path) -> None:
    """Copy what tests can parse elsewhere, where it is small enough."""
    REPORTS_FOLDER.mkdir(parents=True, exist_ok=True)
    reports = [path for path in (_export_ncu(folder), _export_nsys(folder)) if path is not None]
    for path in reports:
        rows = folder / f"{path.stem}.json"
        if path.stat().st_size + rows.stat().st_size > MOST_BYTES:
            print(f"{path.name} is too large to keep: give a smaller --top")
            continue
        shutil.copy(path, REPORTS_FOLDER / path.name)
        shutil.copy(rows, REPORTS_FOLDER / rows.name)
        print(f"kept {REPORTS_FOLDER / path.name}")


def _export_ncu(folder: Path) -> Path | None:
    reports = sorted(folder.glob("ncu.batch*.ncu-rep"))
    if not reports:
        return None
    binary = find_program("ncu", "Nsight Compute", NCU_PLACES)
    command = [binary, f"--import={reports[0]}", *TO_CSV]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = list(csv.reader(io.StringIO(text[text.index('"ID"') :])))
    hidden = [place for place, name in enumerate(rows[0]) if name in HOSTS]
    csv_path = folder / "ncu.csv"
    with csv_path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, quoting=csv.QUOTE_ALL)
        for number, row in enumerate(rows):
            writer.writerow(["" if number and place in hidden else cell for place, cell in enumerate(row)])
    return csv_path


def _export_nsys(folder: Path) -> Path | None:
    report = folder / "nsys.nsys-rep"
    if not report.exists():
        return None
    binary, whole, excerpt = (
        find_program("nsys", "Nsight Systems", NSYS_PLACES),
        folder / "w.sqlite",
        folder / "nsys.sqlite",
    )
    subprocess.run([binary, "export", "--type=sqlite", f"--output={whole}", str(report)], check=True)
    cut(whole, excerpt)
    return excerpt


def cut(whole: Path, excerpt: Path) -> None:
    """Copy the tables of an exported report that opgrip reads, and of its strings those that they name."""
    with closing(sqlite3.connect(whole)) as database:
        database.execute("ATTACH ? AS excerpt", (str(excerpt),))
        there = {name for (name,) in database.execute("SELECT name FROM main.sqlite_master WHERE type = 'table'")}
        named = []
        for table in {EVENTS, CALLS, *(kind.value for kind in Kind)} & there:
            database.execute(f"CREATE TABLE excerpt.{table} AS SELECT * FROM main.{table}")
            columns = {row[1] for row in database.execute(f"PRAGMA main.table_info({table})")}
            strings = {"textId", "shortName", "demangledName", "nameId"} & columns
            named += [f"SELECT {column} FROM main.{table}" for column in strings]
        if STRINGS in there and named:
            id_query = " UNION ".join(named)
            database.execute(f"CREATE TABLE excerpt.{STRINGS} AS SELECT * FROM main.{STRINGS} WHERE id IN ({id_query})")
        database.commit()


if __name__ == "__main__":
    main()
