"""Tests of calls of one signature whose times differ by scope: values are recorded for each such scope."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from opgrip.capture import Capture, Schedule
from opgrip.capture.recording.observations import ANY, SiteKey, SiteTimes
from opgrip.traces import load
from opgrip.traces.values.floats import Floats

DENORMAL = 1e-41  # denormal number, whose square root takes many times as long as that of others


@pytest.fixture
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def note(times: SiteTimes, *calls: tuple[int, int, int, int]) -> set[tuple[int, SiteKey]]:
    """Pass (signature, scope, memory, time in us) of calls to `times`, and return the keys to look at."""
    signatures, scopes, memory, durations = np.array(calls).T
    return set(times.note(signatures, scopes, memory, durations * 1000))


@pytest.mark.parametrize(
    ("steps", "observed"),
    [
        # memory that recurs, one of several times as slow
        ([[(0, 0, memory, 200 if memory == 7 else 40) for memory in (5, 6, 7, 8)]] * 3, {(0, (0, 5)), (0, (0, 7))}),
        ([[(0, 0, memory, 40 + memory) for memory in (5, 6, 7, 8)]] * 3, set()),
        ([[(1, scope, 3, 10 * scope) for scope in (1, 2)]] * 3, set()),
        # scopes, if memory is not used again
        (
            [[(0, scope, 100 + 10 * step + scope, 50 * scope**2) for scope in (1, 2)] for step in range(3)],
            {(0, (1, ANY)), (0, (2, ANY))},
        ),
        (
            [
                [(0, scope, 1000 * step + scope, 400 if scope >= 20 else 40) for scope in range(24)]
                for step in range(20)
            ],
            {(0, (0, ANY)), (0, (20, ANY))},
        ),
    ],
)
def test_sites_that_recur_with_different_times_are_observed_once(
    steps: list[list[tuple[int, int, int, int]]], observed: set[tuple[int, SiteKey]]
) -> None:
    times = SiteTimes()
    assert note(times, *steps[0]) == set()
    assert note(times, *steps[1]) == observed
    assert all(note(times, *step) == set() for step in steps[2:])


@pytest.mark.parametrize("parameters", [36, 300])
def test_slow_parameters_among_many_of_one_shape_are_observed(parameters: int) -> None:
    times = SiteTimes()
    step = [(0, 0, memory, 400 if memory >= parameters - 5 else 40) for memory in range(parameters)]
    note(times, *step)
    fast, slow = sorted(note(times, *step), key=lambda item: item[1])
    assert fast[1][1] < parameters - 5 <= slow[1][1]
    assert note(times, *step) == set()


@pytest.mark.usefixtures("_one_thread")
def test_optimizer_states_of_one_shape_are_observed_if_times_differ(tmp_path: Path) -> None:
    tiny = torch.full((512, 128), DENORMAL)
    tensors = [torch.rand(512, 128), tiny, *(torch.rand(512, 128) for _ in range(3))]
    # NumPy changes them, without a call of torch
    arrays = [tensors[0].numpy(), tensors[2].numpy()]
    schedule = Schedule(warmup=3, active=4)
    with Capture(tmp_path / "t.jsonl", schedule=schedule) as watched:
        for _ in range(7):
            for tensor in tensors:
                tensor.sqrt()
            watched.step()
            # change the values, so that a later look finds values new to the trace
            for array in arrays:
                array[:] *= 1.5
    trace = load(tmp_path / "t.jsonl", partial=False)
    (observed,) = trace.observed.values()
    calls = trace.calls
    memory = {}
    for item in observed:
        assert item.since_ns is not None
        (values,) = item.values
        assert values is not None
        call = calls[calls["start_ns"] >= item.since_ns].iloc[0]
        model = trace.values[values]
        memory[int(trace.storages[call["first_storage"]])] = isinstance(model, Floats) and model.denormals == 0
    own = [int(trace.storages[first]) for first in calls["first_storage"].head(len(tensors))]
    assert memory.pop(own[1]) is False
    assert memory
    assert all(memory.values())
