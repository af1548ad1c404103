"""Tests of gripped calls in a trace: they enclose their operators, which are recorded as without gripping."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gripping
import jsonschema
import numpy as np
import pytest
import torch
from programs import ROOT, refusal, run_command

from opgrip.capture import Capture, Schedule
from opgrip.replay.cases.cases import Selection, make_cases
from opgrip.replay.cases.selection import FUNCTION as UNIT_FUNCTION
from opgrip.replay.cases.subgraphs import make_units
from opgrip.replay.operators.lookup import Unsupported, find_operator
from opgrip.traces import Trace, UserError, load
from opgrip.traces.analysis.dataflow import make_graph
from opgrip.traces.schema.arguments import Opaque, TensorSpec
from opgrip.traces.schema.python_objects import ModuleSpec, ObjectSpec
from opgrip.traces.schema.records import FUNCTION

pytestmark = pytest.mark.filterwarnings("ignore:.* was not gripped:RuntimeWarning")


def step() -> list[Any]:
    torch.manual_seed(0)
    head = gripping.Head()
    boxes = torch.rand(6, 4)
    loss = head(boxes).sum() + gripping.halved(boxes, 2).sum() + gripping.noisy(boxes).sum()
    loss.backward()
    found: list[torch.Tensor] = []
    gripping.filled(boxes, found)
    with pytest.raises(KeyError):
        gripping.failing(boxes)
    return [loss.item(), head.fc.weight.grad.tolist(), found[0].item(), torch.rand(1).item()]


def captured(path: Path, *grip: str) -> tuple[Trace, list[Any]]:
    with Capture(path, grip=grip, force=True):
        result = step()
    return load(path, partial=False), result


def rows(trace: Trace) -> list[tuple[str, str]]:
    own = trace.own_calls
    return list(zip(own["op"].astype(str), own["phase"].astype(str), strict=True))


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trace, Trace]:
    """Return traces of the same step without and with gripped functions."""
    folder = tmp_path_factory.mktemp("traces")
    plain, expected = captured(folder / "plain.jsonl")
    gripped, result = captured(folder / "gripped.jsonl", "gripping:*")
    assert result == expected
    return plain, gripped


def test_gripping_neither_loses_nor_adds_operators(traces: tuple[Trace, Trace]) -> None:
    plain, gripped = traces
    assert rows(gripped) == rows(plain)
    assert gripped.end is not None
    assert gripped.end.dropped == []


def test_gripped_functions_are_calls_with_their_operators_inside(traces: tuple[Trace, Trace]) -> None:
    _, trace = traces
    functions = trace.calls[trace.calls["kind"] == FUNCTION]
    assert functions["op"].astype(str).value_counts().to_dict() == {
        "gripping:halved": 3,
        "gripping:Head.forward": 1,
        "gripping:noisy": 1,
        "gripping:filled": 1,
        "gripping:failing": 1,
    }
    inside = trace.calls[trace.calls["inside"] == "gripping:noisy"]
    assert inside["op"].tolist() == ["aten.rand_like.default", "aten.add.Tensor"]
    assert inside["gripped"].all()
    assert not trace.calls[trace.calls["inside"].isna()]["gripped"].any()
    (call,) = functions[functions["op"] == "gripping:noisy"].itertuples()
    assert call.duration_ns > inside["duration_ns"].sum()


def test_gripped_function_has_its_arguments_results_and_errors(traces: tuple[Trace, Trace]) -> None:
    _, trace = traces
    signatures = {signature.op: signature for signature in trace.signatures if signature.kind == FUNCTION}
    head = signatures["gripping:Head.forward"].args[0]
    assert isinstance(head, ModuleSpec)
    assert head.cls == "gripping:Head"
    weight = head.modules["fc"].parameters["weight"].content
    assert isinstance(weight, TensorSpec)
    assert weight.values in trace.values
    assert isinstance(head.fields["coder"].value, ObjectSpec)
    assert head.fields["coder"].value.fields["lock"] == Opaque("_thread.lock")
    assert signatures["gripping:failing"].raised == "KeyError: 'no boxes'"
    assert signatures["gripping:noisy"].outputs.shape == (6, 4)


def test_gripped_functions_do_not_change_replay_and_graph(traces: tuple[Trace, Trace]) -> None:
    plain, gripped = traces
    cases = [sorted((case.op, case.count) for case in make_cases(trace)) for trace in traces]
    assert cases[0] == cases[1]
    assert len(make_graph(gripped).steps) == len(make_graph(plain).steps)
    units = [{(case.op, case.count) for case in make_units(trace, Selection(), UNIT_FUNCTION)} for trace in traces]
    assert units[0] == units[1]
    assert set(gripped.summary()["op"]) == set(plain.summary()["op"])
    function = next(signature for signature in gripped.signatures if signature.kind == FUNCTION)
    with pytest.raises(Unsupported, match="the operators that this function ran"):
        find_operator(function)


def test_every_record_of_gripped_calls_conforms_to_the_schema(tmp_path: Path) -> None:
    with Capture(tmp_path / "t.jsonl", grip=["gripping:*"]):
        gripping.summed(
            gripping.Boxes(torch.ones(2)),
            gripping.Sizes(1, 2),
            gripping.Corner.TOP,
            np.ones(2),
            np.float32(1),
            of=[{"k": slice(0, 1), (1, 2): ..., 3: frozenset({1})}, range(3), b"bytes", {1.5}, torch.relu],
        )
        gripping.Head()(torch.ones(1, 4))
    schema = jsonschema.Draft202012Validator(json.loads((ROOT / "traces" / "schema.json").read_text()))
    records = list(map(json.loads, (tmp_path / "t.jsonl").read_text().splitlines()))
    assert [error.message for record in records for error in schema.iter_errors(record)] == []


def test_functions_are_gripped_only_in_recorded_steps(tmp_path: Path) -> None:
    with Capture(tmp_path / "t.jsonl", grip=["gripping:scaled"], schedule=Schedule(skip=1, active=1, repeat=2)) as it:
        for rows in range(1, 6):
            gripping.scaled(torch.ones(rows))
            it.step()
    trace = load(tmp_path / "t.jsonl")
    shapes = [item.args[0].shape for item in trace.signatures if item.kind == FUNCTION]
    assert shapes == [(2,), (3,)]


def test_invalid_grip_pattern_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a pattern for functions"):
        Capture(tmp_path / "t.jsonl", grip=["delta2bbox"])
    assert "--grip-to needs --grip" in refusal("opcapture", "--grip-to", "x", "-o", tmp_path / "t.jsonl")


def test_trace_info_reports_gripped_functions(tmp_path: Path) -> None:
    captured(tmp_path / "t.jsonl", "gripping:*")
    done = run_command("opgrip", "trace", "info", tmp_path / "t.jsonl")
    trace = load(tmp_path / "t.jsonl")
    assert f"calls       {len(trace.own_calls):,}\n" in done.stdout
    below = int(trace.calls["gripped"].sum())
    assert f"gripped     7 calls of 5 functions, {below} calls below them" in done.stdout
