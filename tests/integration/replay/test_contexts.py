"""Tests that cases run under the settings of their capture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from settings import rows_of, settings_of

from opgrip.capture import Capture
from opgrip.platform.precisions import describe_precisions, read_precision, set_precision
from opgrip.replay.cases.cases import make_cases
from opgrip.replay.operators.contexts import restored
from opgrip.replay.timing.timed_functions import TimedFunction
from opgrip.traces import load


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
