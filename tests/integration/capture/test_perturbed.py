"""Tests of perturbed calls, which run right after the capture's own work: they are marked, and their times not used."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from opgrip.capture import Capture, Schedule
from opgrip.capture.signatures import fitting
from opgrip.capture.timing.page_faults import PERTURBING_NS, OwnWork
from opgrip.traces import Trace, load

SLOW_S = 0.03


@pytest.fixture
def slow_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    fit = fitting.fit_argument

    def slow(*args: Any) -> Any:
        time.sleep(SLOW_S)
        return fit(*args)

    monkeypatch.setattr(fitting, "fit_argument", slow)


def marks_of(trace: Trace, op: str) -> list[bool]:
    calls = trace.calls[trace.calls["op"] == op]
    return [bool(mark) for mark in calls["perturbed"]]


@pytest.mark.usefixtures("slow_looks")
def test_only_calls_right_after_an_observation_are_perturbed(tmp_path: Path) -> None:
    x = torch.randn(1000)
    with Capture(tmp_path / "t.jsonl"):
        for _ in range(40):
            x.sin()
    marks = marks_of(load(tmp_path / "t.jsonl"), "aten.sin.default")
    assert marks[0]
    assert not any(marks[-10:])


@pytest.mark.usefixtures("slow_looks")
def test_perturbed_times_are_used_if_a_signature_has_no_others(tmp_path: Path) -> None:
    x = torch.randn(1000)
    with Capture(tmp_path / "t.jsonl"):
        x.cos()
        x.sin()
    calls = load(tmp_path / "t.jsonl").calls
    assert len(calls) == 2
    assert calls["perturbed"].all()
    assert (calls["time_ns"] == calls["duration_ns"]).all()


@pytest.mark.usefixtures("slow_looks")
def test_no_call_is_perturbed_after_warmup_steps(tmp_path: Path) -> None:
    x, y = torch.randn(1000), torch.randn(2000)

    def step() -> None:
        for value in (x, y, x):
            value.sin().cos()

    schedule = Schedule(warmup=4, active=3)
    with Capture(tmp_path / "t.jsonl", schedule=schedule) as watched:
        (y + 1).tan()
        for _ in range(7):
            step()
            watched.step()
    trace = load(tmp_path / "t.jsonl", partial=False)
    assert len(trace.own_calls) == 3 * 6
    assert watched.calls == 3 * 6
    assert not trace.calls["perturbed"].any()
    # signatures that only warm-up steps have met are not in the trace
    assert {signature.op for signature in trace.signatures} == {"aten.sin.default", "aten.cos.default"}
    assert watched.signatures == len(trace.signatures) == 4
    assert trace.end is not None
    assert trace.end.signatures == 4


def test_recorded_step_has_values_observed_in_warmup(tmp_path: Path) -> None:
    x = torch.randn(1000) * 7 + 100
    with Capture(tmp_path / "t.jsonl", schedule=Schedule(warmup=1)) as watched:
        for _ in range(2):
            x.sin()
            watched.step()
    trace = load(tmp_path / "t.jsonl", partial=False)
    (signature,) = trace.signatures
    assert 90 < trace.values[signature.args[0].values].mean < 110  # type: ignore[attr-defined, index]


def test_own_work_marks_the_following_and_the_enclosing_call() -> None:
    work = OwnWork()
    work._intervals = [100, 100 + PERTURBING_NS, 200_000, 200_010, 300_000, 300_000 + PERTURBING_NS]
    starts = np.array([0, 100 + PERTURBING_NS, 250_000, 290_000])
    ends = np.array([50, 150_000, 260_000, 400_000])
    assert work.take(starts, ends) == [(1, 1), (3, 1)]
