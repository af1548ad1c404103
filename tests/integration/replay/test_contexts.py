"""Tests that cases run under the settings of their capture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from settings import rows_of, settings_of
from torch.nn import functional

from opgrip.capture import Capture
from opgrip.platform.precisions import describe_precisions, read_precision, set_precision
from opgrip.replay.cases.cases import make_cases
from opgrip.replay.cases.unused_results import FOR_BACKWARD, with_unused_results
from opgrip.replay.checks.reference import Reference
from opgrip.replay.checks.verdicts import Tolerance
from opgrip.replay.modes import RunOutputs
from opgrip.replay.operators.contexts import restored
from opgrip.replay.replay_options import request_with
from opgrip.replay.run.workload import load_workload
from opgrip.replay.timing.timed_functions import TimedFunction
from opgrip.traces import Trace, load


def settings_now() -> dict[str, Any]:
    return {
        "inference": torch.is_inference_mode_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "deterministic_warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "threads": torch.get_num_threads(),
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
    }


def test_settings_apply_in_the_block_and_are_restored() -> None:
    before = settings_now()
    wanted = {
        "inference": True,
        "deterministic": True,
        "deterministic_warn_only": True,
        "matmul_precision": "high",
        "threads": 1,
        "default_dtype": "float64",
    }
    assert wanted != before
    with restored(wanted):
        assert settings_now() == wanted
    assert settings_now() == before


def test_invalid_settings_of_an_untrusted_trace_are_ignored() -> None:
    before = settings_now()
    with restored({"threads": -3, "matmul_precision": "rm -rf", "default_dtype": "int64", "inference": "yes", "x": 1}):
        assert settings_now() == before


def test_case_runs_under_its_captured_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = torch.ones(3), torch.ones(4)
    with Capture(tmp_path / "t.jsonl"):
        x.sin()
        with torch.inference_mode():
            y.sin()
    cases = make_cases(load(tmp_path / "t.jsonl"))
    assert {case.signature.args[0].shape: case.context["inference"] for case in cases} == {(3,): False, (4,): True}
    seen = []
    original = TimedFunction.run

    def watching(timed_function: TimedFunction) -> None:
        seen.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled()))
        original(timed_function)

    monkeypatch.setattr(TimedFunction, "run", watching)
    results = list(rows_of(cases, settings_of(warmup=1, iterations=1)))
    assert [result.status for result in results] == ["ok", "ok"]
    assert seen == [(case.context["inference"], False) for case in cases]


PRECISION = pytest.mark.skipif(read_precision("cuda.matmul") is None, reason="torch has one precision for all places")


@pytest.fixture
def tf32() -> Iterator[None]:
    """Allow TF32 products with torch's newer setting (2.9 and later), after which the older setting cannot be read."""
    before = read_precision("cuda.matmul")
    set_precision("cuda.matmul", "tf32")
    yield
    set_precision("cuda.matmul", before)


@PRECISION
@pytest.mark.usefixtures("tf32")
def test_per_backend_precisions_are_captured(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        torch.get_float32_matmul_precision()
    with Capture(tmp_path / "t.jsonl") as watched:
        torch.ones(3).sin()
    trace = load(tmp_path / "t.jsonl")
    assert (watched.calls, watched.dropped) == (2, 0)
    assert {context["fp32_precision"] for context in trace.contexts.values()} == {"cuda.matmul:tf32"}


@PRECISION
def test_per_backend_precisions_apply_in_the_block_and_are_restored() -> None:
    before = describe_precisions()
    with restored({"fp32_precision": "cuda.matmul:tf32,mkldnn.conv:bf16,os.system:tf32,cudnn.rnn:rm -rf"}):
        assert describe_precisions() == "cuda.matmul:tf32,mkldnn.conv:bf16"
    assert describe_precisions() == before


ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu.default"


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return traces of a step with attention and a norm, for prediction and for training."""
    folder = tmp_path_factory.mktemp("unused")
    torch.manual_seed(0)
    query, weight = torch.randn(2, 4, 8, 16), torch.ones(16, requires_grad=True)
    paths = {kind: folder / f"{kind}.jsonl" for kind in ("predict", "train")}
    for kind, path in paths.items():
        with torch.set_grad_enabled(kind == "train"), Capture(path):
            scaled = functional.layer_norm(query * weight, (16,), weight)
            result = functional.scaled_dot_product_attention(scaled, scaled, scaled)
            if kind == "train":
                result.sum().backward()
    return paths


def unused_in(trace: Trace) -> dict[str, set[int]]:
    cases = with_unused_results(make_cases(trace), trace)
    return {case.op: {*case.unused} for case in cases if case.op.split(".")[1] in FOR_BACKWARD}


PREDICTING = {ATTENTION: {1}, "aten.native_layer_norm.default": {1, 2}}
TRAINING = {ATTENTION: set[int](), "aten.native_layer_norm.default": set[int]()}


def test_dataflow_shows_which_results_a_program_uses(traces: dict[str, Path]) -> None:
    assert unused_in(load(traces["predict"])) == PREDICTING
    assert unused_in(load(traces["train"])) == TRAINING


def test_unused_results_are_determined_only_for_compared_modes(traces: dict[str, Path]) -> None:
    places = {
        mode: {case.op: {*case.unused} for case in load_workload(request_with(traces["predict"], mode=[mode])).cases}
        for mode in ("eager", "jit")
    }
    assert places["jit"][ATTENTION] == {1}
    assert places["eager"][ATTENTION] == set()


def test_difference_in_an_unused_result_is_noted() -> None:
    def two() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ones(3), torch.ones(2)

    reference = Reference(two, lambda: ((), {}), False, None, unused={1})
    others = ((torch.ones(4), " is (4,), not (2,)"), (torch.zeros(2), ": 2 of 2 elements differ, by 1 (rel 1)"))
    for other, note in others:
        verdict = reference.check(RunOutputs([torch.ones(3), other]), Tolerance())
        assert (verdict.right, verdict.max_abs) == (True, 0)
        assert verdict.notes[0].startswith(f"unused output 1{note}")
    assert not reference.check(RunOutputs([torch.zeros(3), torch.ones(2)]), Tolerance()).right
