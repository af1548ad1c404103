"""Tests of distributing cases to devices, and of reading the output of several processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from opgrip.capture import Capture
from opgrip.errors import UserError
from opgrip.replay import replay
from opgrip.replay.operators.devices import DeviceTraits
from opgrip.replay.replay_options import request_with
from opgrip.replay.run.workload import Workload, load_workload
from opgrip.replay.workers.scheduling import PARTS, DealtWindows, interleaved


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("spread") / "t.jsonl"
    with Capture(path):
        for size in range(1, 22):
            torch.ones(size).sin()
    return path


def loaded_on(trace: Path, device: str) -> Workload:
    return load_workload(request_with(trace, device=device, op="aten.sin*", cache="warm"))


def numbers(cases: Iterator[list[Any]]) -> list[list[int]]:
    return [[case.number for case in window] for window in cases]


def test_one_device_has_all_cases_in_one_window(trace: Path) -> None:
    loaded = loaded_on(trace, "cpu")
    windows = DealtWindows(loaded, done=[loaded.cases[0].number])
    assert [len(window) for window in windows.take("cpu")] == [20]


def test_devices_start_with_equal_parts_and_a_finished_one_takes_more(trace: Path) -> None:
    loaded = loaded_on(trace, "cuda,cuda:1")
    windows = DealtWindows(loaded, done=())
    dealt = {device: len(windows.dealt_to(device)) for device in ("cuda:0", "cuda:1")}
    assert dealt == {"cuda:0": 12, "cuda:1": 9}
    slow, quick = windows.take("cuda:0"), windows.take("cuda:1")
    first = numbers(iter([next(slow)]))
    others = numbers(quick)
    assert len(others) > PARTS - 1
    assert numbers(slow) == []
    assert sorted(number for window in first + others for number in window) == sorted(
        case.number for case in loaded.cases
    )


def test_each_process_gets_only_its_device(trace: Path) -> None:
    job = request_with(trace, device=["cuda:0", "cuda:1"])
    loaded = load_workload(job)
    assert loaded.devices == ("cuda:0", "cuda:1")
    there = loaded.on("cuda:1")
    assert there.request.inputs.device == "cuda:1"
    assert there.device == there.place("cpu") == "cuda:1"
    assert load_workload(there.request).timing == there.timing


@pytest.mark.parametrize("devices", ["cpu,cpu", "cpu,meta"])
def test_cases_are_spread_only_over_accelerators(trace: Path, devices: str) -> None:
    with pytest.raises(UserError, match="several devices must be different accelerators, got cpu, "):
        replay(trace, device=devices)


def test_devices_are_equal_by_name_memory_and_capability() -> None:
    one = DeviceTraits("H200", 150_000_000_000, "9.0")
    assert one.is_like(replace(one, memory_bytes=149_000_000_000))
    for other in (
        replace(one, name="A100"),
        replace(one, memory_bytes=75_000_000_000),
        replace(one, capability="8.0"),
    ):
        assert not one.is_like(other)
        assert not other.is_like(one)


class Pipe:
    """Stand-in for a process that writes one byte for each of its rows."""

    def __init__(self) -> None:
        self._from, self.to = os.pipe()
        os.set_blocking(self._from, False)

    def fileno(self) -> int:
        return self._from

    def lane(self, name: str, count: int, hear: Callable[[str], None]) -> Iterator[Any]:
        rows = 0
        while rows < count:
            yield None
            hear(name)
            with suppress(BlockingIOError):
                rows += len(os.read(self._from, 1))
                yield [name]


def test_rows_arrive_as_written_and_silent_processes_are_checked() -> None:
    busy, silent = Pipe(), Pipe()
    heard: list[str] = []
    lanes: Any = {
        busy: busy.lane("busy", 3, heard.append),
        silent: silent.lane("silent", 1, heard.append),
    }
    rows = interleaved(lanes)
    for _ in range(2):
        os.write(busy.to, b"a")
        assert next(rows) == ["busy"]
    # a hanging process is detected even if another one writes all the time
    assert heard.count("silent") == 1
    os.write(silent.to, b"a")
    assert next(rows) == ["silent"]
    os.write(busy.to, b"a")
    assert list(rows) == [["busy"]]
