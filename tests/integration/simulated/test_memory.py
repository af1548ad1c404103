"""Tests of the memory that a step replay takes of a device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from simulation import on_simulator
from torch import nn

from opgrip.capture import Capture
from opgrip.replay.cases.flow import make_flow
from opgrip.replay.run.request import RunRequest
from opgrip.replay.run.workload import workload_for
from opgrip.replay.sequences import step_memory
from opgrip.replay.sequences.call_timers import sequence_settings
from opgrip.replay.sequences.step_replay import SequenceResult, replay_sequence
from opgrip.traces import Trace, load

WIDTH = 512


def capture_training(path: Path) -> Trace:
    """Capture a step that changes all of its weights and their state."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(12))).to("sim")
    optimizer = torch.optim.Adam(model.parameters(), fused=False, foreach=False)
    rows = torch.rand(8, WIDTH, device="sim")

    def step() -> None:
        optimizer.zero_grad()
        model(rows).sum().backward()
        optimizer.step()

    step()
    with Capture(path):
        step()
    return load(path, partial=False)


def replay_in(trace: Trace, room_bytes: int | None = None) -> tuple[SequenceResult, int]:
    """Return the result of a step replay, and the most memory of the device that it took."""
    settings = sequence_settings(workload_for(RunRequest(), trace))
    torch.sim.reset_peak_memory_stats()
    before = torch.sim.memory_allocated()
    result = replay_sequence(trace, replace(settings, repeats=3, room_bytes=room_bytes))
    return result, torch.sim.max_memory_allocated() - before


@on_simulator(SIM_DEVICES="1")
def test_step_replay_needs_little_more_memory_than_its_program(tmp_path: Path) -> None:
    trace = capture_training(tmp_path / "t.jsonl")
    result, _ = replay_in(trace)
    program_bytes = result.outside_bytes + result.captured_peak_bytes
    # weights and two states each
    assert result.outside_bytes > 3 * 12 * WIDTH * WIDTH * 4
    assert result.replayed == result.calls
    # on a device that has just that
    result, peak_bytes = replay_in(trace, room_bytes=int(1.3 * program_bytes))
    assert result.replayed == result.calls
    assert peak_bytes <= 1.3 * program_bytes


@on_simulator(SIM_DEVICES="1")
def test_step_is_restored_from_the_device_without_host_memory(tmp_path: Path) -> None:
    trace = capture_training(tmp_path / "t.jsonl")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_memory, "room_on", lambda device: 0)
        result, peak_bytes = replay_in(trace, room_bytes=1 << 30)
    assert result.replayed == result.calls
    assert peak_bytes > 1.8 * result.outside_bytes


@on_simulator(SIM_DEVICES="1")
def test_device_memory_is_restored_from_the_host(tmp_path: Path) -> None:
    x = torch.zeros(4, device="sim")
    with Capture(tmp_path / "t.jsonl"):
        x.add_(1)
        x.mul_(2)
    trace = load(tmp_path / "t.jsonl", partial=False)
    results = [replay_in(trace)[0] for _ in range(2)]
    assert [result.replayed for result in results] == [2, 2]
    memory = step_memory_of(trace, limit=40)
    for _ in range(2):
        memory.begin()
        (storage,) = memory.live.values()
        values = torch.empty(0, device="sim").set_(storage)
        assert values.tolist() == [0.0] * 4
        values.add_(1)
    memory.forget_constants()
    assert memory.kept_bytes == 16
    memory.begin()
    assert values.tolist() == [0.0] * 4
    memory.forget_constants()
    values.add_(1)
    # what did not change is not restored
    memory.begin()
    assert values.tolist() == [1.0] * 4


@on_simulator(SIM_DEVICES="1")
def test_device_memory_is_restored_from_the_device_if_it_has_room_for_twice_the_step(tmp_path: Path) -> None:
    x = torch.zeros(4, device="sim")
    with Capture(tmp_path / "t.jsonl"):
        x.add_(1)
    memory = step_memory_of(load(tmp_path / "t.jsonl", partial=False), limit=64)
    memory.begin()
    (storage,) = memory.live.values()
    values = torch.empty(0, device="sim").set_(storage).add_(1)
    assert memory.kept_bytes == 16
    memory.forget_constants()
    assert memory.kept_bytes == 32
    memory.begin()
    assert values.tolist() == [0.0] * 4


def step_memory_of(trace: Trace, limit: int) -> step_memory.StepMemory:
    settings, flow = sequence_settings(workload_for(RunRequest(), trace)), make_flow(trace)
    return step_memory.StepMemory(flow.needs, flow.outside, trace.values, settings.place, 0, limit)
