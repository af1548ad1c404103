"""Tests of step replay with too little memory: calls without memory are lost, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from example_trace import write

from opgrip.capture import Capture
from opgrip.replay.cases.cases import make_cases
from opgrip.replay.inputs.inputs import device_map
from opgrip.replay.reports.step_report import print_sequence
from opgrip.replay.results.results import FAILED, OK, SKIPPED, UNSUPPORTED
from opgrip.replay.run.request import RunRequest
from opgrip.replay.run.workload import workload_for
from opgrip.replay.sequences import step_passes
from opgrip.replay.sequences import step_replay as sequence
from opgrip.replay.sequences.call_timers import SequenceSettings
from opgrip.replay.sequences.dry_run import DryRun
from opgrip.replay.sequences.step_options import rows_of, totals_of
from opgrip.replay.sequences.step_replay import SequenceResult, replay_sequence
from opgrip.traces import Trace, load
from opgrip.traces.schema.arguments import TensorSpec
from opgrip.traces.schema.records import OPERATOR, Calls, Record, Scope, Signature, Thread, Values
from opgrip.traces.values.floats import Floats

MB = 1 << 20
SETTINGS = SequenceSettings(device_map("cpu", None), "cpu", repeats=3)
FEW = TensorSpec((8,), (1,), torch.float32, "cpu")
LARGE = TensorSpec((MB // 4,), (1,), torch.float32, "cpu")
UNMADE = TensorSpec((1 << 50,), (1,), torch.float32, "cpu")


def reasons_of(result: SequenceResult) -> dict[str, str]:
    return {item.op: f"{item.status}: {item.reason}" for item in result.not_replayed}


def trace_of(path: Path, *calls: tuple[Signature, int, int], values: list[Record] = []) -> Trace:  # noqa: B006
    """Write a trace of calls with their operators, input storages and output storages."""
    count = len(calls)
    signatures = {call[0].number: call[0] for call in calls}
    block = Calls(
        *(0, [call[0].number for call in calls], [0] * count, [10 * place for place in range(count)], [5] * count),
        *([2] * count, [number for call in calls for number in call[1:]]),
    )
    records = [*values, *signatures.values(), Scope(0, "", "", "forward"), Thread(0, "MainThread"), block]
    return load(write(path, records))


@pytest.mark.parametrize(
    ("spec", "values", "reason"),
    [
        (UNMADE, [], f"it needs {1 << 52} bytes, more memory than is available"),
        (
            replace(FEW, values=7),
            [Values(7, Floats(1e308, 1e308, 1e308, 1e308, 0.0, 0.0, 0.0, 0.0))],
            "value cannot be converted to type float",
        ),
    ],
)
def test_missing_results_lose_only_the_calls_that_take_them(
    tmp_path: Path, spec: TensorSpec, values: list[Record], reason: str
) -> None:
    cos = Signature(0, OPERATOR, "aten.cos.default", (FEW,), {}, spec, raised="RuntimeError: planted")
    exp = Signature(1, OPERATOR, "aten.exp.default", (spec,), {}, FEW)
    tan = Signature(2, OPERATOR, "aten.tan.default", (FEW,), {}, FEW)
    calls = [(tan, 0, 1), (cos, 0, 2), (exp, 2, 3), (tan, 3, 4)]
    trace = trace_of(tmp_path / "t.jsonl", *calls, values=values)
    result = replay_sequence(trace, SETTINGS)
    assert (result.replayed, result.unsupported, result.repeats) == (2, 2, 3)
    assert reason in reasons_of(result)["aten.exp.default"]
    rows = {row.op: row for row in rows_of(result, make_cases(trace), workload_for(RunRequest(), trace))}
    assert [rows[f"aten.{name}.default"].status for name in ("cos", "exp", "tan")] == [SKIPPED, UNSUPPORTED, OK]
    assert rows["aten.tan.default"].median_us


def test_results_without_memory_are_found_in_the_dry_run(tmp_path: Path) -> None:
    signature = Signature(0, OPERATOR, "aten.to_sparse.default", (FEW,), {}, FEW)
    calls = [(signature, 0, 1 + place) for place in range(sequence.MOST_FAILURES + 5)]
    result = replay_sequence(trace_of(tmp_path / "t.jsonl", *calls), SETTINGS)
    assert (result.substituted, result.repeats) == (result.calls, 3)


def test_memory_drawn_for_failing_calls_is_freed(tmp_path: Path) -> None:
    # the dimension is out of range
    bad = [Signature(number, OPERATOR, "aten.cumsum.default", (LARGE, 5 + number), {}, LARGE) for number in range(10)]
    sin = Signature(10, OPERATOR, "aten.sin.default", (LARGE,), {}, LARGE)
    calls = [(signature, 0, 1 + place) for place, signature in enumerate([*bad, sin])]
    trace = trace_of(tmp_path / "t.jsonl", *calls)
    result = replay_sequence(trace, replace(SETTINGS, room_bytes=5 * MB))
    assert (result.replayed, result.unsupported) == (1, 10)
    assert "more memory than is available" not in " ".join(reasons_of(result).values())


def test_substitutes_are_kept_only_if_memory_suffices(tmp_path: Path) -> None:
    bad = Signature(0, OPERATOR, "aten.cumsum.default", (FEW, 5), {}, LARGE)
    exp = Signature(1, OPERATOR, "aten.exp.default", (LARGE,), {}, LARGE)
    calls = [call for place in range(1, 21, 2) for call in ((bad, 0, place), (exp, place, place + 1))]
    trace = trace_of(tmp_path / "t.jsonl", *calls)
    result = replay_sequence(trace, replace(SETTINGS, room_bytes=4 * MB))
    assert (result.replayed, result.unsupported, result.repeats) == (10, 10, 3)


def test_more_memory_never_replays_fewer_calls(tmp_path: Path) -> None:
    x = torch.ones(MB // 4)
    with Capture(tmp_path / "t.jsonl"):
        for _ in range(5):
            x.cumsum(0).add_(1).sin()
    trace = load(tmp_path / "t.jsonl")
    results = [replay_sequence(trace, replace(SETTINGS, room_bytes=room * MB)) for room in (1, 2, 3, 4, 5)]
    replayed = [result.replayed for result in results]
    assert replayed == sorted(replayed)
    assert (replayed[0], replayed[-1]) == (0, 15)
    assert {result.repeats for result in results} == {3}


def test_step_without_a_complete_pass_has_no_ok_rows_and_a_reason(
    tiny_trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = step_passes.run_call

    def failing(dry_run: DryRun, call: Any, part: Any, watch: Any) -> None:
        if call.op == "aten.relu_.default":
            raise RuntimeError("planted")
        run(dry_run, call, part, watch)

    monkeypatch.setattr(step_passes, "run_call", failing)
    trace = load(tiny_trace)
    result = replay_sequence(trace, SETTINGS)
    reason = "all 20 passes failed, the last one in aten.relu_.default: RuntimeError: planted"
    assert (result.repeats, result.failure) == (0, reason)
    assert totals_of(result)["replayed_ms"] is None
    rows = rows_of(result, make_cases(trace), workload_for(RunRequest(), trace))
    assert {row.status for row in rows} <= {FAILED, UNSUPPORTED}
    assert {row.error for row in rows if row.status == FAILED and "relu" not in row.op} == {reason}
    shown = StringIO()
    print_sequence(result, rows, 3, shown)
    assert f"nothing was measured: {reason}" in shown.getvalue()
    assert "nan" not in shown.getvalue()
