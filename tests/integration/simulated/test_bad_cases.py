"""Tests of cases that fail on an accelerator: each costs only its own row, although errors arrive late."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from settings import settings_of
from simulation import on_simulator

from opgrip.capture import Capture
from opgrip.replay import Results
from opgrip.replay.cases.cases import Case
from opgrip.replay.cases.functions import function_case
from opgrip.replay.command.opreplay import main as opreplay
from opgrip.replay.operators.devices import DeviceLostError, use_device
from opgrip.replay.results.results import FAILED, OK, Result
from opgrip.replay.run.measure import measure_cases
from opgrip.replay.run.workload import Workload, empty_row

ASSERT = "device-side assert triggered"
MB = 1 << 20


def settings_on(device: str, **options: Any) -> Workload:
    """Return settings of a few runs on a device."""
    few = {"iterations": 3, "warmup": 2, "cache": "warm", "clock_warmup": 0} | options
    use_device(device)
    return settings_of(device=device, memory=True, **few)


def case_of(number: int, function: Callable[[torch.Tensor], Any], size: int = 4) -> Case:
    return function_case(function, [torch.ones(size)], name=f"case{number}", number=number)


def failing(is_bad: Callable[[torch.Tensor], bool]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function whose kernel fails if `is_bad`, which shows at the next synchronization."""

    def call(x: torch.Tensor) -> torch.Tensor:
        if x.device.type == "sim" and is_bad(x):
            torch.sim.fail("aten::cos", ASSERT)
        return x.cos()

    return call


def in_run(run: int) -> Callable[[torch.Tensor], bool]:
    """Return a predicate that is true in this run on a device, counted from one."""
    runs = count(1)
    return lambda x: x.device.type == "sim" and next(runs) == run


def blamed(bad: Case, settings: Workload) -> tuple[int, int]:
    """Return the case and row announced when the device was lost, for a bad case between good ones."""
    announced = []
    cases = [case_of(0, torch.sin), bad, case_of(2, torch.tan)]
    with pytest.raises(DeviceLostError, match=ASSERT):
        list(measure_cases(cases, settings, announce=lambda *at: announced.append(at)))
    return announced[-1]


@on_simulator(SIM_DEVICES="12")
def test_device_assert_in_any_run_is_attributed_to_its_row() -> None:
    for run in range(1, 4):
        bad = case_of(1, failing(in_run(run)))
        assert blamed(bad, settings_on(f"sim:{run}")) == (1, 0), f"in run {run}"


# failures in the second row of a case only, with the options that create two rows
WAYS: list[tuple[Callable[[torch.Tensor], bool], dict[str, str]]] = [
    (lambda _: torch.jit.is_tracing(), {"mode": "eager,jit"}),
    (lambda x: not x.any(), {"values": "recorded,zeros"}),
    (lambda _: torch.get_num_threads() == 2, {"threads": "1,2"}),
]


@on_simulator(SIM_DEVICES="4")
def test_device_assert_in_one_variant_loses_only_its_row() -> None:
    for is_bad, options in WAYS:
        bad, settings = case_of(1, failing(is_bad)), settings_on("sim:3", **options)
        lost = empty_row(bad, settings.variants(bad)[1], settings, FAILED, ASSERT)
        assert statuses([bad, case_of(2, torch.tan)], settings, {1: {1: lost}}) == {1: [OK, FAILED], 2: [OK, OK]}
    for place, (is_bad, options) in enumerate(WAYS):
        bad = case_of(1, failing(is_bad))
        assert blamed(bad, settings_on(f"sim:{place}", **options)) == (1, 1), options


def statuses(
    cases: list[Case], settings: Workload, cached_rows: Mapping[int, Mapping[int, Result]] | None = None
) -> dict[int, list[str]]:
    """Return the statuses of the rows of each case."""
    all_rows = measure_cases(cases, settings, cached_rows=cached_rows)
    return {rows[0].case: [row.status for row in rows] for rows in all_rows}


@on_simulator(SIM_FAIL=f"aten::cos={ASSERT}")
def test_device_assert_loses_one_row(tmp_path: Path) -> None:
    trace, output = tmp_path / "t.jsonl", tmp_path / "rows.json"
    with Capture(trace):
        torch.ones(3).cos()
        torch.ones(3).sin()
    few = ("--iterations", "2", "--warmup", "0", "--cache", "warm", "--clock-warmup", "0")
    assert opreplay([str(trace), "--device", "sim:1", "--op", "aten.[cs][oi]*", *few, "-o", str(output)]) == 0
    rows = Results.load(output).frame.set_index("op")
    assert rows["status"].to_dict() == {"aten.cos.default": FAILED, "aten.sin.default": OK}
    assert rows.loc["aten.cos.default", "error"] == f"it made the device unusable: SIM error: {ASSERT}"


@on_simulator(SIM_FAIL=f"aten::cos={ASSERT}")
def test_device_assert_in_a_sequence_loses_one_call(tmp_path: Path) -> None:
    trace, output = tmp_path / "t.jsonl", tmp_path / "sequence.json"
    with Capture(trace):
        torch.ones(3).sin().cos().tan()
    assert opreplay([str(trace), "--device", "sim:1", "--sequence", "--iterations", "1", "-o", str(output)]) == 0
    result = json.loads(output.read_text())["sequence"]
    assert result["calls"] == 4
    (lost,) = result["not_replayed"]
    assert (lost["op"], lost["status"], lost["count"]) == ("aten.cos.default", "unsupported", 1)
    assert lost["reason"] == f"it made the device unusable: SIM error: {ASSERT}", lost


@on_simulator(SIM_MEMORY=str(64 * MB))
def test_case_that_runs_out_of_memory_frees_it_for_the_next() -> None:
    for run in range(1, 6):
        is_run = in_run(run)

        def want_more(x: torch.Tensor, is_run: Callable[[torch.Tensor], bool] = is_run) -> torch.Tensor:
            held = torch.empty(30 * MB, dtype=torch.uint8, device=x.device)
            if is_run(x):
                torch.empty(50 * MB, dtype=torch.uint8, device=x.device)
            return held[:1]

        def take_most(x: torch.Tensor) -> torch.Tensor:
            return torch.empty(55 * MB, dtype=torch.uint8, device=x.device)[:1]

        cases = [case_of(1, want_more), case_of(2, take_most)]
        assert statuses(cases, settings_on("sim:0")) == {1: [FAILED], 2: [OK]}, f"in run {run}"
        assert torch.sim.memory_allocated("sim:0") < MB, f"in run {run}"
