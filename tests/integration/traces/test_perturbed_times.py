"""Tests that times of perturbed calls are excluded from computed times."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from example_trace import write

from opgrip.replay.inputs.inputs import device_map
from opgrip.replay.sequences.call_timers import SequenceSettings
from opgrip.replay.sequences.step_replay import replay_sequence
from opgrip.traces import Trace, load
from opgrip.traces.analysis.dataflow import make_graph
from opgrip.traces.analysis.longtail import find_longtail
from opgrip.traces.schema.arguments import TensorSpec
from opgrip.traces.schema.records import Calls, End, Scope, Signature, Thread

SPEC = TensorSpec((8, 8), (8, 1), torch.float32, "cpu")
SIN_NS, EXP_NS, PERTURBED_NS = 1_000_000, 10_000, 50_000_000
INTERRUPTED_NS = 80_000_000
GAP_NS, PERTURBED_GAP_NS = 5_000, 30_000_000


def trace_of(
    path: Path, perturbed: Sequence[int], device_ns: Sequence[int] = (), exps: int = 3, interrupted: Sequence[int] = ()
) -> Trace:
    """Write a trace of a chain of four sines, then independent exponentials, some perturbed or interrupted."""
    ops = ("aten.sin.default", "aten.exp.default")
    calls = 4 + exps
    signature = [0] * 4 + [1] * exps
    durations = [SIN_NS] * 4 + [PERTURBED_NS if place in perturbed else EXP_NS for place in range(4, calls)]
    durations = [INTERRUPTED_NS if place in interrupted else duration for place, duration in enumerate(durations)]
    starts = [0]
    for place, duration in enumerate(durations[:-1], start=1):
        starts.append(starts[-1] + duration + (PERTURBED_GAP_NS if place in perturbed else GAP_NS))
    flows = [0, 1, 1, 2, 2, 3, 3, 4, *range(10, 10 + 2 * exps)]
    marks = [(place, 1) for place in perturbed]
    table = Calls(0, signature, [0] * calls, starts, durations, [2] * calls, flows, -1, [*device_ns], perturbed=marks)
    return load(
        write(
            path / "t.jsonl",
            [
                *(Signature(number, "operator", op, (SPEC,), {}, SPEC) for number, op in enumerate(ops)),
                Scope(0, "m", "M", "forward", None, "wave", "waves.py", 1),
                Thread(0, "MainThread"),
                table,
                End(calls, 2, 10**9, [], []),
            ],
        ),
        partial=False,
    )


def test_critical_path_uses_unperturbed_times(tmp_path: Path) -> None:
    graph = make_graph(trace_of(tmp_path, [4]))
    assert list(graph.facts.critical_path) == [0, 1, 2, 3]
    assert graph.facts.critical_ns == graph.facts.critical_host_ns == 4 * SIN_NS


def test_perturbed_launches_do_not_count_for_the_critical_host_time(tmp_path: Path) -> None:
    graph = make_graph(trace_of(tmp_path, [4], [-1] * 4 + [9 * SIN_NS] * 3))
    (number,) = graph.facts.critical_path
    assert number >= 4
    assert (graph.facts.critical_ns, graph.facts.critical_host_ns) == (9 * SIN_NS, EXP_NS)


@pytest.mark.parametrize("device_ns", [[], [-1] * 4 + [2 * EXP_NS] * 3])
def test_captured_times_of_a_sequence_are_unperturbed(tmp_path: Path, device_ns: list[int]) -> None:
    settings = SequenceSettings(device_map("cpu", None), "cpu", repeats=1)
    result = replay_sequence(trace_of(tmp_path, [4], device_ns), settings)
    exp_ns = 2 * EXP_NS if device_ns else EXP_NS
    assert result.captured_ms == (4 * SIN_NS + 3 * exp_ns) / 1e6
    assert result.captured_host_ms == (4 * SIN_NS + 3 * EXP_NS) / 1e6
    assert result.captured_critical_ms == 4 * SIN_NS / 1e6


def test_longtail_times_are_unperturbed(tmp_path: Path) -> None:
    (function,) = find_longtail([trace_of(tmp_path, range(5, 24), exps=20)], lambda trace: 1e10).functions
    assert function.operator_ns == 4 * SIN_NS + 20 * EXP_NS
    assert function.between_ns == 23 * GAP_NS


def test_longtail_uses_perturbed_times_without_others(tmp_path: Path) -> None:
    (function,) = find_longtail([trace_of(tmp_path, [4, 5, 6])], lambda trace: 1e10).functions
    assert function.operator_ns == 4 * SIN_NS + 3 * PERTURBED_NS


def test_interrupted_unperturbed_call_does_not_determine_the_time(tmp_path: Path) -> None:
    calls = trace_of(tmp_path, [4, 5], interrupted=[6]).calls
    assert calls["time_ns"].tolist() == [SIN_NS] * 4 + [PERTURBED_NS] * 3
    calls = trace_of(tmp_path, [4, 5], exps=4, interrupted=[6]).calls
    assert calls["time_ns"].tolist() == [SIN_NS] * 4 + [(INTERRUPTED_NS + EXP_NS) / 2] * 2 + [INTERRUPTED_NS, EXP_NS]
    assert trace_of(tmp_path, [4, 5]).calls["time_ns"].tolist() == [SIN_NS] * 4 + [EXP_NS] * 3
