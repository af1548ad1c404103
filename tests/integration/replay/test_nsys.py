"""Replays under Nsight Systems, to whose reports kernels are added, and ranges for torch's profiler and NVTX."""

import gzip
import json
import sqlite3
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from busy import compared_times
from optional import needs
from programs import refusal, succeed

from opgrip.errors import UserError
from opgrip.replay import Results
from opgrip.replay.analyses import nsys
from opgrip.replay.analyses.nsys import Nsys, NsysColumns, joined, profile_rows, read_report, with_seen
from opgrip.replay.analyses.profiler_programs import arguments_in, merged_arguments
from opgrip.replay.analyses.timeline import merged
from opgrip.replay.command.run_requests import request_with
from opgrip.replay.results.results import OK, Result
from opgrip.replay.timing.ranges import BEFORE, DOMAIN, DROPPED, READY

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


CASES = 50
real = needs("nsys")
OLD_NVTX = pytest.mark.skipif(int(version("nvtx").split(".")[2]) > 11, reason="needs a newer nsys than Debian's")


@pytest.mark.alone
@OLD_NVTX
@real
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_case_has_ranges_and_nsys_times_agree_with_ours(detector_trace: Path, tmp_path: Path) -> None:
    output = tmp_path / "rows.json"
    done = succeed("opreplay", detector_trace, "--top", CASES, "--nsys", "--cache", "warm", "-o", output)
    assert (tmp_path / "rows.nsys-rep").stat().st_size > 0
    assert "nsys recorded nothing" not in done.stderr
    rows = Results.load(output).frame
    assert len(rows) == CASES
    assert rows["nsys_runs"].eq(10).all()
    slow = rows[rows["nsys_own_us"] > 100]
    assert len(slow) >= 10
    ratios = slow["nsys_us"] / slow["nsys_own_us"]
    with compared_times():
        assert 0.98 < ratios.median() < 1.02
        # another program may take the processor between the readings of the two clocks
        assert ratios.between(0.9, 1.1).sum() >= len(slow) - 1, ratios.to_dict()


def test_arguments_of_a_file_are_parsed_as_in_a_shell(tmp_path: Path) -> None:
    path = tmp_path / "arguments"
    path.write_text("--stats=true  # all\n--env-var='A=1 2'\n", encoding="utf-8")
    assert arguments_in(path, nsys.FLAGS) == ["--stats=true", "--env-var=A=1 2"]


@pytest.mark.parametrize("text", ["--output=x", "-ox"])
def test_arguments_file_must_not_name_the_report(tmp_path: Path, text: str) -> None:
    path = tmp_path / "arguments"
    path.write_text(text, encoding="utf-8")
    message = "sets --output, which only opgrip may set: set the path of the report with opreplay's --output"
    with pytest.raises(UserError, match=message):
        arguments_in(path, nsys.FLAGS)


@pytest.mark.parametrize(
    ("text", "merged"),
    [
        ("--trace cuda -t osrt -s cpu", "--trace=nvtx,cuda,osrt -s cpu"),
        ("-tnone --sample process-tree --stats=true", "--trace=nvtx --sample process-tree --stats=true"),
    ],
)
def test_profiler_options_are_merged_into_one_each(text: str, merged: str) -> None:
    assert merged_arguments(["--trace=nvtx", "--sample=none"], text.split(), nsys.FLAGS) == merged.split()


RANGES = [(100, 199, READY, 7), (200, 300, "aten.mm", 7), (400, 500, "aten.mm", 7), (600, 650, "aten.sin", 8)]


def made_up_report(path: Path) -> Path:
    ran = [(220, 250, 1, "gemm"), (260, 270, 2, "reduce"), (420, 450, 3, "gemm"), (560, 570, 5, "gemm")]
    kernels = [{"start": start, "end": end, "correlationId": number, "name": name} for start, end, number, name in ran]
    # the copy continues long after its call has returned
    copies = [{"start": 520, "end": 540, "correlationId": 4, "bytes": 4096}]
    launches = [(205, 1), (210, 2), (405, 3), (410, 4), (550, 5)]
    write_report(path, RANGES, launches, {"KERNEL": kernels, "MEMCPY": copies})
    with closing(sqlite3.connect(path)) as database:
        database.execute(f"UPDATE CUPTI_ACTIVITY_KIND_RUNTIME SET globalTid = {AUTOGRAD} WHERE correlationId = 2")
        foreign: dict[str, Any] = {"eventType": RANGE, "category": 1, "globalTid": THREAD}
        insert(database, "NVTX_EVENTS", start=210, end=220, text="foreign", domainId=4, int64Value=7, **foreign)
        insert(database, "NVTX_EVENTS", start=700, text="never ended", domainId=3, int64Value=9, **foreign)
        database.commit()
    return path


def row(case: int) -> Result:
    return Result(case, "aten.mm", "", 1, 1.0, "eager", "cuda", OK, 0.0, 0.0)


def test_kernels_and_copies_belong_to_the_call_that_launched_them(tmp_path: Path) -> None:
    seen, outside = joined(read_report(made_up_report(tmp_path / "report.sqlite")))
    assert outside == 1
    met = NsysColumns.of(with_seen(row(7), row(7), seen))
    assert (met.nsys_us, met.nsys_runs) == (0.1, 2)
    assert met.nsys_kernels == "gemm x1; reduce x0.5"
    assert met.nsys_launches == 1.5
    assert met.nsys_gpu_us == pytest.approx((30 + 10 + 30) / 2 / 1e3)
    # gaps: 250 to 260 in the first run, 450 to 520 in the second
    assert met.nsys_gap_us == pytest.approx((10 + 70) / 2 / 1e3)
    assert (met.nsys_copies, met.nsys_copied_bytes) == (0.5, 2048)
    assert NsysColumns.of(with_seen(row(8), None, seen)).nsys_launches is None


def test_dropped_run_is_in_no_figure(tmp_path: Path) -> None:
    path = made_up_report(tmp_path / "report.sqlite")
    with closing(sqlite3.connect(path)) as database:
        # right after the first run
        database.execute("UPDATE NVTX_EVENTS SET start = 310, end = 311 WHERE start = 100")
        database.execute("UPDATE StringIds SET value = ? WHERE value = ?", (DROPPED, READY))
        database.commit()
    seen, outside = joined(read_report(path))
    assert outside == 1
    met = NsysColumns.of(with_seen(row(7), row(7), seen))
    assert (met.nsys_us, met.nsys_runs, met.nsys_kernels) == (0.1, 1, "gemm x1")
    assert (met.nsys_copies, met.nsys_copied_bytes) == (1, 4096)


def test_invalid_nsys_report_is_reported_in_one_line(tmp_path: Path) -> None:
    foreign, empty, other = (tmp_path / name for name in ("foreign", "empty", "other"))
    foreign.write_bytes(b"no database at all, but long enough to be read as one" * 20)
    sqlite3.connect(empty).close()
    empty.touch()
    with closing(sqlite3.connect(other)) as database:
        database.execute("CREATE TABLE NVTX_EVENTS (begin INTEGER)")
    for path in (foreign, empty, other):
        with pytest.raises(UserError) as raised:
            read_report(path)
        assert "\n" not in str(raised.value)


WINDOWS = 12


def gpu_row(case: int) -> Result:
    return Result(case, f"aten.op{case}", "", 1, 1.0, "eager", "cuda:0", OK, 0.0, 0.0)


def columns_of(path: Path, case: int = 7) -> NsysColumns:
    runs, _ = joined(read_report(path))
    return NsysColumns.of(with_seen(gpu_row(case), None, runs))


def window(path: Path, case: int) -> Path:
    kernel = {"start": 210, "end": 220, "correlationId": 1, "name": f"kernel{case}"}
    return write_report(path, [(200, 300, f"aten.op{case}", case)], [(205, 1)], {"KERNEL": [kernel]})


def test_kernels_of_each_part_belong_to_the_cases_of_the_part(tiny_trace: Path, tmp_path: Path) -> None:
    stand_in = NsysStandIn(tmp_path / "bin", [window(tmp_path / f"window{case}", case) for case in range(WINDOWS)])
    nsys, notices = Nsys(str(stand_in.binary), tmp_path / "rows.nsys-rep"), list[str]()
    rows = profile_rows(
        request_with(tiny_trace), [gpu_row(case) for case in range(WINDOWS)], nsys, 60, notices.append, "cuda:0"
    )
    kernels = [NsysColumns.of(item).nsys_kernels for item in rows]
    assert kernels == [f"kernel{case} x1" for case in range(WINDOWS)]
    assert [NsysColumns.of(item).nsys_runs for item in rows] == [1] * WINDOWS
    # numerical order: the tenth follows the ninth, not the first
    kept = [tmp_path / "rows.nsys-rep", *(tmp_path / f"rows.{number}.nsys-rep" for number in range(2, WINDOWS + 1))]
    assert [span.case for path in kept for span in read_report(path).spans] == list(range(WINDOWS))
    assert notices == [f"open nsys's report in Nsight Systems: {path}" for path in kept]


def test_kernels_of_a_cuda_graph_belong_to_the_run_that_launched_it(tmp_path: Path) -> None:
    kernels = [
        {"start": start, "end": start + 10, "correlationId": 1, "name": "kernel", "graphNodeId": node}
        for node, start in enumerate((210, 220, 240), 1)
    ]
    path = write_report(tmp_path / "report", [(200, 300, "aten.mm", 7)], [(205, 1)], {"KERNEL": kernels})
    seen = columns_of(path)
    assert (seen.nsys_launches, seen.nsys_gpu_us, seen.nsys_gap_us) == (3.0, 0.03, 0.01)


def test_work_of_preceding_calls_and_flushes_is_not_reported_as_lost(tmp_path: Path) -> None:
    ranges = [(100, 140, BEFORE, 3), (150, 190, READY, 7), (200, 300, "aten.mm", 7)]
    launches = [(90, 1), (110, 2), (160, 3), (205, 4), (350, 5)]
    kernels = [
        {"start": start + 5, "end": start + 9, "correlationId": number, "name": f"kernel{number}"}
        for start, number in launches
    ]
    runs, outside = joined(read_report(write_report(tmp_path / "report", ranges, launches, {"KERNEL": kernels})))
    # the first and the last kernel are outside of our ranges
    assert outside == 2
    assert [work.name for work in runs[7, "eager"][0].work] == ["kernel4"]
    assert set(runs) == {(7, "eager")}


def test_kernel_that_keeps_the_device_busy_is_not_part_of_a_run(tmp_path: Path) -> None:
    kernels = [
        {"start": 205, "end": 230, "correlationId": 1, "name": "spin_kernel"},
        {"start": 240, "end": 250, "correlationId": 2, "name": "gemm"},
    ]
    path = write_report(tmp_path / "report", [(200, 300, "aten.mm", 7)], [(202, 1), (203, 2)], {"KERNEL": kernels})
    seen = columns_of(path)
    assert (seen.nsys_kernels, seen.nsys_gpu_us, seen.nsys_gap_us) == ("gemm x1", 0.01, 0.0)


FAST = ("--top", "4", "--iterations", "2", "--warmup", "0")


def read(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    assert isinstance(events, list)
    return events


def test_timeline_has_a_range_for_each_run_with_its_operators(tiny_trace: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    # torch's profiler does not count range markers as operators; on a busy machine the marker is among the top
    done = succeed("opreplay", tiny_trace, *FAST, "--op", "aten.*", "--mode", "jit", "--profile", "-o", output)
    assert f"{tmp_path}/out.timeline.json.gz" in done.stderr
    events = read(tmp_path / "out.timeline.json.gz")
    rows = Results.load(output).frame
    rows = rows[rows["status"] == "ok"]
    assert set(rows["mode"]) == {"eager", "jit"}
    for row in rows.itertuples():
        runs = [event for event in events if event["name"] == f"case {row.case} {row.op} {row.mode}"]
        # runs invalidated by a slowed-down processor were repeated
        assert len(runs) >= 2, (row, done.stderr)
        for run in runs:
            inside = [
                event["name"]
                for event in events
                if event.get("cat") == "cpu_op" and run["ts"] <= event["ts"] <= run["ts"] + run["dur"]
            ]
            # TorchScript runs some operators as others: addmm as mm and add
            is_seen = bool(inside) if row.mode == "jit" else any(row.op.split(".")[1] in name for name in inside)
            assert is_seen, (row, run, inside, done.stderr)


def test_existing_timeline_is_replaced_only_with_force(tiny_trace: Path, tmp_path: Path) -> None:
    (tmp_path / "out.timeline.json.gz").write_text("mine")
    error = refusal("opreplay", tiny_trace, *FAST, "--profile", "-o", tmp_path / "out.json")
    assert "out.timeline.json.gz exists" in error
    assert (tmp_path / "out.timeline.json.gz").read_text() == "mine"


def test_merged_timelines_start_at_the_earliest_time() -> None:
    first = {"baseTimeNanoseconds": 5_000, "traceName": "/tmp/1.json", "traceEvents": [{"name": "a", "ts": 1.0}]}
    second = {"baseTimeNanoseconds": 8_000, "traceEvents": [{"name": "b", "ts": 1.5}, {"name": "c", "ph": "M"}]}
    whole = merged(iter([first, second]))
    assert whole["traceEvents"] == [{"name": "a", "ts": 1.0}, {"name": "b", "ts": 4.5}, {"name": "c", "ph": "M"}]
    assert "traceName" not in whole


@pytest.mark.slow
def test_sample_that_was_run_to_load_it_has_a_timeline(tmp_path: Path) -> None:
    succeed("opreplay", "sample:nms", *FAST, "--profile", "-o", tmp_path / "out.json")
    assert any(event["name"] == "case 0 nms eager" for event in read(tmp_path / "out.timeline.json.gz"))
