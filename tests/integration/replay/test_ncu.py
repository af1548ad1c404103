"""Energy, clocks and counters of a GPU, without a GPU: stand-ins for NVML and for Nsight Compute."""

import csv
import io
import json
import os
import subprocess
import sys
from itertools import chain, repeat
from pathlib import Path
from time import perf_counter

import pandas as pd
import pytest
import torch
from nvml import BUSY_W, IDLE_W, Nvml, properties_of
from programs import refusal, run_command, succeed
from settings import rows_of, settings_of

from opgrip.errors import UserError
from opgrip.platform.machine import Gpu, find_gpu, open_gpu
from opgrip.replay import Results
from opgrip.replay.analyses.ncu.ncu import BASIC, DURATION, NcuKernel, in_template, joined, kernels_of_csv, metrics_of
from opgrip.replay.command.run_requests import request_with
from opgrip.replay.results.results import OK, Result
from opgrip.replay.run import energy, measure
from opgrip.replay.run import measure as metering
from opgrip.replay.run.energy import EnergyColumns, Meter, open_meter
from opgrip.replay.run.workload import load_workload

PUSHED = "thread Domain:Push/Pop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg"
STARTED = "Id:Domain:Start/Stop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg"
HEADING = ["ID", "Process ID", "Process Name", "Host Name", PUSHED, STARTED, "Kernel Name", "Context", "Stream"]
UNITS = {DURATION: "ns", "dram__bytes_read.sum": "byte", "dram__bytes_write.sum": "byte", "lts__t_bytes.sum": "byte"}

FAST = ("--top", "7", "--iterations", "1", "--warmup", "0")

STAND_IN = """
import json, os, sys
from pathlib import Path

told = json.loads(Path(os.environ["STAND_IN"]).read_text())
importing = next((word for word in sys.argv if word.startswith("--import=")), None)
if importing:
    print("==PROF== a line of its own")
    print(told["printed"] or Path(importing.split("=", 1)[1]).read_text(), end="")
    sys.exit(0)
work = json.loads(Path(sys.argv[-2]).read_text())
cases = [case for case in told["cases"] if case not in work["without"]]
with open(told["log"], "a") as log:
    log.write(json.dumps({"argv": sys.argv[1:], "cases": cases, "request": work["request"]}) + "\\n")
metrics = next(word for word in sys.argv if word.startswith("--metrics=")).partition("=")[2].split(",")
for lacking in told["lacks"]:
    if lacking in metrics:
        print("==PROF== Connected to process 7 (/usr/bin/python3)")
        print(f"==ERROR== Failed to find metric {told['lacks'][lacking]}")
        sys.exit(1)
if told["says"]:
    print(told["says"])
if set(cases) & set(told["dies"]):
    os.abort()
if told["says"]:
    sys.exit(1)
report = next(word for word in sys.argv if word.startswith("--export=")).split("=", 1)[1]
Path(report).write_text("".join([told["head"], *(told["kernels"][str(case)] for case in cases), told["tail"]]))
"""


class StandIn:
    def __init__(self, folder: Path, rows: pd.DataFrame) -> None:
        self.binary, self._told, self._log = folder / "ncu", folder / "told.json", folder / "log.jsonl"
        self.binary.write_text(f"#!{sys.executable}\n{STAND_IN}")
        self.binary.chmod(0o755)
        self.environment = {**os.environ, "STAND_IN": str(self._told)}
        self._state = {
            "cases": [int(case) for case in rows["case"]],
            "log": str(self._log),
            "says": "",
            "dies": [],
            "lacks": {},
            "printed": "",
            "head": table([]),
            "kernels": {
                str(case): lines(
                    [(f"case {case} {op} eager", "gemm", 3000.0), (f"case {case} {op} eager", "add", 1000.0)]
                )
                for case, op in zip(rows["case"], rows["op"], strict=True)
            },
            "tail": "",
        }
        self.tell()

    def tell(self, **state: object) -> None:
        self._state |= state
        self._told.write_text(json.dumps(self._state))

    def calls(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self._log.read_text().splitlines()]

    def replay(self, trace: Path, output: Path, *options: str) -> subprocess.CompletedProcess[str]:
        elsewhere = ("--batch-device", "cuda", "--batch-command", "{command}", "--ncu-bin", str(self.binary))
        words = ("-o", output, "--ncu", *FAST, "--run-batch-size", "3", *elsewhere, *options)
        return run_command("opreplay", trace, *words, env=self.environment)


def lines(kernels: list[tuple[str, str, float]], metrics: dict[str, float] | None = None) -> str:
    """Return lines of a raw page: ranges in which kernels were launched, kernel names and times in ns."""
    text = io.StringIO()
    writer = csv.writer(text, quoting=csv.QUOTE_ALL)
    for number, (named, name, duration) in enumerate(kernels):
        values = dict.fromkeys(BASIC, 50.0) | {DURATION: duration, "dram__bytes_read.sum": 1e6} | (metrics or {})
        cell = f"7:opgrip:{named}:int64:3:none:none:registered:{named}" if named else ""
        start = [number, 1, "python", "host", "", cell, name, 1, 7]
        writer.writerow([*start, *(f"{values[name]:,.2f}" for name in BASIC)])
    return text.getvalue()


def table(kernels: list[tuple[str, str, float]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, quoting=csv.QUOTE_ALL)
    writer.writerow([*HEADING, *BASIC])
    writer.writerow([*[""] * len(HEADING), *(UNITS.get(name, "%") for name in BASIC)])
    return text.getvalue() + lines(kernels)


@pytest.fixture(scope="module")
def rows(tiny_trace: Path, tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    output = tmp_path_factory.mktemp("rows") / "rows.json"
    succeed("opreplay", tiny_trace, *FAST, "-o", output)
    table = Results.load(output).frame
    return table[table["status"] == "ok"]


@pytest.fixture
def stand_in(rows: pd.DataFrame, tmp_path: Path) -> StandIn:
    return StandIn(tmp_path, rows)


def test_rows_have_the_ncu_measurements_of_their_kernels(stand_in: StandIn, tiny_trace: Path, tmp_path: Path) -> None:
    done = stand_in.replay(tiny_trace, tmp_path / "out.json", "--ncu-iterations", "2")
    assert done.returncode == 0, done.stderr
    table = Results.load(tmp_path / "out.json").frame
    table = table[table["status"] == "ok"]
    assert set(table["ncu_kernels"]) == {"gemm x0.5; add x0.5"}
    assert set(table["ncu_launches"]) == {1.0}
    assert set(table["ncu_us"]) == {2.0}
    assert set(table["ncu_dram_bytes"]) == {round((2e6 + 100) / 2)}
    assert set(table["ncu_occupancy"]) == {0.5}
    assert "occupied" in done.stdout
    assert len(list(tmp_path.glob("out.batch*.ncu-rep"))) == len(stand_in.calls())
    assert not list(tmp_path.glob("*journal"))
    assert not list(tmp_path.glob(".opgrip*"))


def test_ncu_profiles_only_the_ranges_of_rows_and_keeps_clocks(
    stand_in: StandIn, tiny_trace: Path, tmp_path: Path
) -> None:
    arguments = tmp_path / "more.txt"
    arguments.write_text("# a comment\n--section SpeedOfLight\n")
    more = ("--ncu-args-file", str(arguments), "--ncu-metrics", "lts__t_sector_hit_rate.pct", "--cache", "cold")
    done = stand_in.replay(tiny_trace, tmp_path / "out.json", *more)
    assert done.returncode == 0, done.stderr
    call = stand_in.calls()[0]
    wanted = {
        *("--nvtx", "--nvtx-include=regex:opgrip@case .+", "--target-processes=all", "--profile-from-start=off"),
        *("--clock-control=none", "--cache-control=all", f"--metrics={DURATION},lts__t_sector_hit_rate.pct"),
        *("--section", "SpeedOfLight"),
    }
    assert wanted <= set(call["argv"])  # type: ignore[arg-type]
    request = call["request"]
    assert isinstance(request, dict)
    assert (request["inputs"]["device"], request["profiled"]) == ("cuda", "ncu")
    assert (request["effort"]["iterations"], request["effort"]["warmup"]) == (1, 1)


@pytest.mark.slow
def test_failed_ncu_batch_loses_only_itself_and_resume_reruns_it(
    stand_in: StandIn, tiny_trace: Path, tmp_path: Path, rows: pd.DataFrame
) -> None:
    output = tmp_path / "out.json"
    dead = int(rows["case"].iloc[4])
    stand_in.tell(dies=[dead])
    done = stand_in.replay(tiny_trace, output)
    assert done.returncode == 0, done.stderr
    calls = stand_in.calls()
    lost = next(call["cases"] for call in calls if dead in call["cases"])  # type: ignore[operator]
    table = Results.load(output).frame.set_index("case")
    seen = table.loc[list(rows["case"]), "ncu_us"]
    assert set(seen.index[seen.isna()]) == set(lost)  # type: ignore[call-overload]
    assert f"batch 2 of {len(calls)}, 3 cases" in done.stderr
    assert "signal 6" in done.stderr
    assert "--resume" in done.stderr
    stand_in.tell(dies=[])
    again = stand_in.replay(tiny_trace, output, "--resume")
    assert again.returncode == 0, again.stderr
    assert "replaying 0 cases" in again.stderr
    assert [call["cases"] for call in stand_in.calls()[len(calls) :]] == [lost]
    table = Results.load(output).frame.set_index("case")
    assert table.loc[list(rows["case"]), "ncu_us"].notna().all()
    assert not list(tmp_path.glob("*journal"))


def test_missing_counter_permission_is_explained_and_rows_are_kept(
    stand_in: StandIn, tiny_trace: Path, tmp_path: Path
) -> None:
    stand_in.tell(says="==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access counters")
    done = stand_in.replay(tiny_trace, tmp_path / "out.json")
    assert done.returncode == 2
    assert "NVreg_RestrictProfilingToAdminUsers=0" in done.stderr.splitlines()[-1]
    assert len(stand_in.calls()) == 1
    stand_in.tell(says="")
    again = stand_in.replay(tiny_trace, tmp_path / "out.json", "--resume")
    assert again.returncode == 0, again.stderr
    assert "replaying 0 cases" in again.stderr


@pytest.mark.slow
def test_default_metric_that_a_chip_lacks_is_left_out(stand_in: StandIn, tiny_trace: Path, tmp_path: Path) -> None:
    tensor, memory = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active", "dram__bytes_read.sum"
    # older versions report the metric's name, newer ones the pattern that they derive from it
    stand_in.tell(lacks={tensor: tensor, memory: r"regex:^dram__bytes_read\.sum$"})
    done = stand_in.replay(tiny_trace, tmp_path / "out.json")
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if "is left out" in line] == [
        f"opreplay: metric {name} is left out, because this GPU does not have it" for name in (tensor, memory)
    ]
    table = Results.load(tmp_path / "out.json").frame
    table = table[table["status"] == "ok"]
    assert set(table["ncu_us"]) == {4.0}
    # batches after the first request only available metrics
    asked = [next(word for word in call["argv"] if word.startswith("--metrics=")) for call in stand_in.calls()]  # type: ignore[attr-defined]
    assert [(tensor in metrics, memory in metrics) for metrics in asked] == [
        *[(True, True), (False, True)],
        *[(False, False)] * (len(asked) - 2),
    ]


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"printed": "no such page\n"}, "opgrip does not know the format"),
        ({"says": "==ERROR== Failed to find metric dram__x"}, "does not know the metric dram__x"),
    ],
)
def test_error_common_to_every_batch_is_reported_in_one_line(
    stand_in: StandIn, tiny_trace: Path, tmp_path: Path, state: dict[str, str], message: str
) -> None:
    stand_in.tell(**state)
    done = stand_in.replay(tiny_trace, tmp_path / "out.json")
    assert done.returncode == 2
    assert message in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_missing_ncu_is_reported_with_the_searched_places(tiny_trace: Path) -> None:
    elsewhere = ("--ncu", "--batch-device", "cuda", "--batch-command", "{command}")
    error = refusal("opreplay", tiny_trace, *elsewhere, "--ncu-bin", "/nowhere/ncu")
    assert "/nowhere/ncu is not a program that can be run" in error
    error = refusal("opreplay", tiny_trace, *elsewhere, env={**os.environ, "PATH": "/usr/bin:/bin"})
    assert "ncu is neither on PATH nor at /usr/local/cuda" in error


def test_ranges_with_a_common_prefix_are_distinguished() -> None:
    def row(case: int, threads: int | None) -> Result:
        return Result(case, "aten.mm", "", 1, 0.5, "eager", "cuda", "ok", 1.0, 1.0, threads=threads)

    found, outside = joined(
        [row(1, None), row(1, 2), row(11, None)],
        [
            NcuKernel(name, f"7:opgrip:{name}:int64:1:none:none:registered:{name}", {})
            for name in ("case 1 aten.mm eager", "case 1 aten.mm eager 2 threads", "case 11 aten.mm eager")
        ],
    )
    assert outside == 0
    assert found.keys() == {(1, "eager"), (1, "eager 2 threads"), (11, "eager")}
    assert all(kernel.name == f"case {key[0]} aten.mm {key[1]}" for key, [kernel] in found.items())


def test_page_numbers_are_read_with_thousands_separators() -> None:
    text = "==PROF== Connected\n" + table([("case 3 aten.mm eager", "gemm<float, (int)2>", 1234567.5)])
    [kernel] = kernels_of_csv(text, BASIC)
    assert kernel.name == "gemm<float, (int)2>"
    assert kernel.metrics[DURATION] == 1234567.5
    assert set(kernel.metrics) == set(BASIC)
    assert "case 3 aten.mm eager" in kernel.ranges


def test_metrics_are_sets_and_names_together() -> None:
    assert metrics_of("basic") == BASIC
    assert metrics_of("sm__cycles_active.avg") == (DURATION, "sm__cycles_active.avg")
    assert set(BASIC) < set(metrics_of("memory,compute"))
    for wrong in ("bsaic", "sm__x;rm", "--help"):
        with pytest.raises(UserError, match="is not a metric"):
            metrics_of(wrong)


def test_command_template_takes_words_or_text() -> None:
    assert in_template("srun --gres=gpu:1 {command}", ["ncu", "a b"]) == ["srun", "--gres=gpu:1", "ncu", "a b"]
    assert in_template("ssh gpu 'cd /x && {command}'", ["ncu", "a b"]) == ["ssh", "gpu", "cd /x && ncu 'a b'"]


COUNTER = "nvmlDeviceGetTotalEnergyConsumption"
POWER, CLOCK = "nvmlDeviceGetPowerUsage", "nvmlDeviceGetClockInfo"
REASONS = "nvmlDeviceGetCurrentClocksEventReasons"
QUICK = {"seconds": 0.3, "idle_s": 0.1}


def nothing() -> None:
    pass


def test_energy_of_a_busy_gpu_is_correct_if_readings_are_slow() -> None:
    nvml = Nvml(query_s=0.02)
    runs = list[float]()

    def run() -> None:
        nvml.run()
        runs.append(perf_counter())

    energy = Meter(Gpu(nvml, "GPU")).measure(run, nothing, **QUICK)
    busy_mj = BUSY_W * nvml.busy_s / len(runs) * 1e3
    above_idle_mj = busy_mj * (1 - IDLE_W / BUSY_W)
    assert energy.millijoules is not None
    assert energy.above_idle_mj is not None
    assert 0.8 * busy_mj < energy.millijoules < 1.25 * busy_mj
    assert 0.7 * above_idle_mj < energy.above_idle_mj < 1.25 * above_idle_mj
    assert energy.idle_w == pytest.approx(IDLE_W, rel=0.25)
    assert (energy.clock_mhz, energy.throttled) == (1500, ("SwPowerCap",))


def test_energy_is_power_times_time_without_an_energy_counter() -> None:
    nvml = Nvml(COUNTER)
    energy = Meter(Gpu(nvml, "GPU")).measure(nvml.run, nothing, **QUICK)
    assert energy.millijoules is not None
    # the stand-in reports idle power, and a run takes a millisecond or more
    assert energy.millijoules > IDLE_W * 0.9
    assert energy.idle_w == pytest.approx(IDLE_W)


@pytest.mark.parametrize("lacks", [(CLOCK,), (COUNTER, POWER, REASONS)])
def test_values_that_a_virtual_machine_hides_are_empty(lacks: tuple[str, ...]) -> None:
    nvml = Nvml(*lacks)
    energy = Meter(Gpu(nvml, "GPU")).measure(nvml.run, nothing, seconds=0.0, idle_s=0.06)
    assert (energy.clock_mhz is None) is (CLOCK in lacks)
    assert (energy.throttled == ()) is (REASONS in lacks)
    assert (energy.millijoules is None) is (energy.idle_w is None) is (energy.above_idle_mj is None)
    assert (energy.millijoules is None) is (COUNTER in lacks and POWER in lacks)


def test_mig_instance_has_the_clock_of_the_gpu_and_no_energy(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml(kind="MIG")
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties_of)
    gpu = open_gpu("cuda:0")
    assert (gpu.clock_mhz(), gpu.throttle_reasons()) == (1500, ["SwPowerCap"])
    assert (gpu.energy_mj(), gpu.power_mw()) == (None, None)
    gpu.close()
    assert nvml.closed


def test_missing_nvml_reports_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(UserError, match="--energy needs pynvml: pip install 'nvidia-ml-py"):
        open_meter("cuda:0")
    assert find_gpu("cuda:0") is None


@pytest.mark.slow
def test_rows_remain_ok_if_the_meter_returns_nothing(tiny_trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = load_workload(request_with(tiny_trace, top=1)).cases
    settings = settings_of(iterations=2, warmup=0, cache="warm", energy=True)
    monkeypatch.setattr(metering, "open_meter", lambda device: Meter(Gpu(Nvml(COUNTER, POWER, CLOCK, REASONS), "GPU")))
    [row] = rows_of(cases, settings)
    assert (row.status, row.clock_mhz, EnergyColumns.of(row).energy_mj) == (OK, None, None)

    def unreachable(device: str) -> Meter:
        raise UserError(f"NVML does not report {device}", "see nvidia-smi -q")

    monkeypatch.setattr(metering, "open_meter", unreachable)
    [row] = rows_of(cases, settings)
    assert (row.status, row.added) == (OK, {})


def test_rows_have_the_clock_at_which_they_were_timed(tiny_trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml()
    monkeypatch.setattr(measure, "find_gpu", lambda device: Gpu(nvml, "GPU"))
    rows = rows_of(load_workload(request_with(tiny_trace, top=3)).cases, settings_of(iterations=2, warmup=0))
    assert {(row.status, row.clock_mhz, row.throttled) for row in rows} == {(OK, 1500, "SwPowerCap")}
    assert nvml.closed
    # the clock was throttled all the time
    assert {row.slowed for row in rows} == {1.0}
    assert all("slowed" in row.doubts for row in rows)


def test_runs_with_a_throttled_clock_are_discarded(tiny_trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml()
    reasons = chain([4, 4, 4], repeat(0))
    monkeypatch.setattr(nvml, REASONS, lambda handle: next(reasons))
    monkeypatch.setattr(measure, "find_gpu", lambda device: Gpu(nvml, "GPU"))
    monkeypatch.setattr(energy, "EVERY_S", 0.0)
    [row] = rows_of(load_workload(request_with(tiny_trace, top=1)).cases, settings_of(iterations=5, cache="warm"))
    assert (row.samples, row.throttled) == (5, "SwPowerCap")
    assert row.dropped >= 3
