"""Tests of later calls of a signature: values and results that determine a call's cost are in the trace."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from opgrip.capture import Capture
from opgrip.capture.signatures import fitting
from opgrip.replay.cases.cases import make_cases
from opgrip.replay.inputs.inputs import Inputs, device_map
from opgrip.traces import Trace, load


def rows_of(trace: Trace, op: str) -> list[int]:
    """Return the number of result rows in an operator's signature and in each of its observed calls."""
    (signature,) = [item for item in trace.signatures if item.op == op]
    outputs = [signature.outputs, *(item.outputs for item in trace.observed.get(signature.number, []))]
    return [output.shape[0] for output in outputs]


def test_calls_with_other_counts_are_observed_early_and_late(tmp_path: Path) -> None:
    masks = [torch.arange(1000) < count for count in range(1, 401)]
    with Capture(tmp_path / "t.jsonl") as watched:
        for place, mask in enumerate(masks):
            mask.nonzero()
            if place % 50 == 49:
                assert watched._flusher is not None
                watched._flusher.flush()
    trace = load(tmp_path / "t.jsonl", partial=False)
    found = rows_of(trace, "aten.nonzero.default")
    assert found[:4] == [1, 2, 4, 8]
    assert len(found) > 5
    assert found[4] > 32
    assert len(trace.calls) == 400
    assert watched.dropped == 0


def test_replay_runs_all_observed_values(tmp_path: Path) -> None:
    with Capture(tmp_path / "t.jsonl"):
        for count in (100, 900, 300, 500):
            (torch.arange(1000) < count).nonzero()
    (case,) = [case for case in make_cases(load(tmp_path / "t.jsonl")) if case.op == "aten.nonzero.default"]
    found = []
    for signature in (case.signature, *case.input_sets):
        args, _ = Inputs(signature.args, {}, case.values, device_map("cpu", None), 0).make()
        found.append((args[0].nonzero().shape[0], signature.outputs.shape[0]))
    assert found == [(100, 100), (900, 900), (500, 500)]


class Mark:
    """Device event that is complete at the third query."""

    def __init__(self) -> None:
        self.asked = 0

    def query(self) -> bool:
        self.asked += 1
        return self.asked > 2

    def wait(self, stream: object) -> None:
        pass


def test_values_on_a_device_are_fitted_after_their_transfer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # without a GPU: the tensors' device and its events are stand-ins
    monkeypatch.setattr("opgrip.capture.signatures.fitting.is_deferred", lambda tensor: True)
    monkeypatch.setattr(fitting, "record_on", lambda device: Mark())
    monkeypatch.setattr(fitting, "is_capturing", lambda kind: False)
    monkeypatch.setattr(fitting, "new_stream", lambda device: None)
    for name in ("on_device", "in_stream"):
        monkeypatch.setattr(fitting, name, nullcontext)
    mask = torch.arange(5000) % 7 == 0
    with Capture(tmp_path / "t.jsonl") as watched:
        mask.nonzero()
        assert watched._flusher is not None
        for _ in range(4):
            watched._flusher.flush()
        torch.arange(70, 300).sin()
    trace = load(tmp_path / "t.jsonl", partial=False)
    (nonzero,) = [signature for signature in trace.signatures if signature.op == "aten.nonzero.default"]
    assert trace.values[nonzero.args[0].values].true == int(mask.sum())  # type: ignore[attr-defined]


def test_values_are_distinguished_by_scalar_arguments(tmp_path: Path) -> None:
    x = torch.randn(1000, 4)
    with Capture(tmp_path / "t.jsonl"):
        x.index_select(0, torch.tensor([900, 950, 999]))
        x.index_select(1, torch.tensor([0, 1, 3]))
        x[torch.tensor([5, 6, 7])]
        x[:, torch.tensor([1, 2, 3])]
    cases = make_cases(load(tmp_path / "t.jsonl"))
    found = []
    for case in cases:
        if "index" in case.op:
            args, _ = Inputs(case.signature.args, {}, case.values, device_map("cpu", None), 0).make()
            index = args[-1][-1] if isinstance(args[-1], list) else args[-1]
            found.append(sorted(index.tolist()))
    assert sorted(found) == [[0, 1, 3], [1, 2, 3], [5, 6, 7], [900, 950, 999]]
