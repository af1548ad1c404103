"""Tests that validation finds every kind of fault in a trace, and that the JSON Schema matches the writer."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from example_trace import write
from programs import ROOT, SHIPPED_TRACES
from unusual_tensors import ALL

from opgrip.capture import Capture
from opgrip.cli.output_files import read_chunks
from opgrip.traces.analysis.validation import NOT_INSTALLED, SchemaCheck, validate

Line = dict[str, Any]


def findings(path: Path) -> list[tuple[int, str, str]]:
    return [(item.record, item.kind, item.message) for item in validate(path).findings]


@pytest.mark.parametrize("path", SHIPPED_TRACES, ids=lambda path: path.name)
def test_shipped_traces_are_valid(path: Path) -> None:
    validation = validate(path)
    assert not validation.findings
    assert not validation.notes
    assert validation.records == len(path.read_bytes().splitlines())
    assert b'"dropped":[]' in path.read_bytes().splitlines()[-1]


def test_captured_traces_are_valid(tiny_trace: Path) -> None:
    assert findings(tiny_trace) == []


def changed(path: Path, change: Callable[[list[Line]], None], source: Path) -> Path:
    lines = [json.loads(line) for line in source.read_bytes().splitlines()]
    change(lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def of_type(lines: list[Line], kind: str) -> Line:
    return next(line for line in lines if line["type"] == kind)


def _lose(kind: str) -> Callable[[list[Line]], None]:
    return lambda lines: lines.remove(of_type(lines, kind))


def _repeat_scope(lines: list[Line]) -> None:
    lines.insert(lines.index(of_type(lines, "scope")), dict(of_type(lines, "scope")))


def _lengthen_call(lines: list[Line]) -> None:
    block = of_type(lines, "calls")
    # the second call now ends halfway through the third
    block["duration_ns"][1] = block["after_ns"][2] + block["duration_ns"][2] // 2


def _hide_calls(lines: list[Line]) -> None:
    block = of_type(lines, "calls")
    for name in ("signature", "scope", "after_ns", "duration_ns"):
        block[name] = block[name][:-1]
    block["storages"] = block["storages"][: -block["tensors"].pop()]


def _break_schema(lines: list[Line]) -> None:
    of_type(lines, "end")["dropped"] = [{"op": "aten.x", "reason": "no", "count": -1}]


def _await_more_times(lines: list[Line]) -> None:
    lines.insert(-1, {"type": "device_times", "thread": 0, "first": 10**6, "device_ns": [1]})


def _enter_another_signature(lines: list[Line]) -> None:
    opened = {"type": "signature", "id": 59, "kind": "operator", "op": "aten.gelu.default", "args": []}
    entered = {"type": "entered", "thread": 0, "start_ns": 1, "scope": 0, "signature": 0}
    lines.insert(-1, entered | {"opened": opened | {"outputs": None}})


def _enter_as_another_operator(lines: list[Line]) -> None:
    _enter_another_signature(lines)
    lines[-2]["opened"]["id"] = 0


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (_lose("signature"), "reference", "no record before has the signature 0"),
        (_lose("scope"), "reference", "no record before has the scope 0"),
        (_lose("values"), "reference", "no record has the values 0"),
        (_lose("end"), "total", "the closing record is missing"),
        (_repeat_scope, "number", "a second scope 0"),
        (_lengthen_call, "time", "overlaps an earlier call, but is not inside it"),
        (_hide_calls, "total", "but the records before have"),
        (_break_schema, "schema", "dropped[0].count"),
        (_enter_another_signature, "reference", "it refers to signature 0, but describes signature 59"),
        (_enter_as_another_operator, "reference", "describes signature 0 as aten.gelu.default, but its record says"),
        (_await_more_times, "reference", "device times of 1,000,001 calls of thread 0"),
    ],
)
def test_fault_is_found(
    tiny_trace: Path, tmp_path: Path, change: Callable[[list[Line]], None], kind: str, words: str
) -> None:
    path = changed(tmp_path / "t.jsonl", change, tiny_trace)
    matches = [message for _, other, message in findings(path) if other == kind and words in message]
    assert matches, findings(path)


def test_findings_have_the_number_of_their_record(tiny_trace: Path, tmp_path: Path) -> None:
    lines = tiny_trace.read_bytes().splitlines(keepends=True)
    lines[4] = b"{nonsense\n"
    lines[6] = b'{"type":"thread","type":"thread","id":7,"name":"x"}\n'
    (tmp_path / "t.jsonl").write_bytes(b"".join(lines))
    form = [(record, message) for record, kind, message in findings(tmp_path / "t.jsonl") if kind == "form"]
    assert [record for record, _ in form] == [5, 7]
    assert "is not JSON" in form[0][1]
    assert "occurs twice" in form[1][1]


@pytest.mark.parametrize(
    ("starts", "durations", "crosses"),
    [
        ([0, 5], [10, 10], True),
        ([5, 0], [3, 10], False),
        ([0, 10], [10, 5], False),
        # three nested calls, in the order of their ends
        ([2, 1, 0], [1, 4, 9], False),
        # around the second call, but overlapping the first
        ([0, 6, 3], [5, 1, 9], True),
    ],
)
def test_overlapping_calls_must_nest(tmp_path: Path, starts: list[int], durations: list[int], crosses: bool) -> None:
    count = len(starts)
    after = [0, *(later - earlier for earlier, later in pairwise(starts))]
    records: list[Line] = [
        {"type": "header", "format": "opgrip-trace", "version": "1.5"},
        {"type": "thread", "id": 0, "name": "main"},
        {"type": "scope", "id": 0, "module": "", "module_type": "", "phase": "forward"},
        {"type": "signature", "id": 0, "kind": "operator", "op": "aten.relu.default", "args": [], "outputs": None},
        {"type": "calls", "thread": 0, "start_ns": starts[0], "signature": [0] * count, "scope": [0] * count}
        | {"after_ns": after, "duration_ns": durations, "tensors": [], "newest": -1, "storages": []},
        {"type": "end", "calls": count, "signatures": 1, "duration_ns": 99, "dropped": [], "passed_by": []}
        | {"without_values": []},
    ]
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in records))
    assert [kind for _, kind, _ in findings(path)] == (["time"] if crosses else [])


def test_file_of_another_tool_is_validated_as_converted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Operator: aten.relu.default\ncnt: 3, ((T([2, 3], f32),), {})\n")
    validation = validate(tmp_path / "a.txt")
    assert not validation.findings
    assert "a file of tritonbench" in validation.notes[0]


def test_validation_without_jsonschema_notes_the_skipped_check(
    tiny_trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    assert not SchemaCheck().is_available
    validation = validate(tiny_trace)
    assert validation.notes == [NOT_INSTALLED]
    assert not validation.findings


SCHEMA = json.loads((ROOT / "traces" / "schema.json").read_text(encoding="utf-8"))


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in b"".join(read_chunks(path)).splitlines()]


def check(path: Path) -> None:
    validator = jsonschema.Draft202012Validator(SCHEMA)
    branches = {
        name: validator.evolve(schema={**SCHEMA["$defs"][name], "$defs": SCHEMA["$defs"]}) for name in SCHEMA["$defs"]
    }
    for record in records(path):
        errors = [error.message for error in branches[record["type"]].iter_errors(record)]
        assert not errors, (record, errors)


def test_shipped_schema_equals_the_generated_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs")
    assert import_module("trace_schema").trace_schema() == SCHEMA, "write it with: python docs/trace_schema.py"


def test_schema_is_a_valid_json_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta")
@pytest.mark.filterwarnings("ignore:.*quantiz")
def test_tensors_of_every_layout_follow_the_schema(tmp_path: Path) -> None:
    tensors = [make() for make in ALL.values()]
    with Capture(tmp_path / "t.jsonl"):
        for tensor in tensors:
            torch.ops.aten.detach(tensor)
    check(tmp_path / "t.jsonl")


def test_every_type_of_record_follows_the_schema(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl")
    check(path)
    validator = jsonschema.Draft202012Validator(SCHEMA)
    for record in records(path):
        validator.validate(record)


def _signature_of(fields: dict[str, Any]) -> dict[str, Any]:
    tensor = {"shape": [2], "stride": [1], "dtype": "quint8", "device": "cpu", **fields}
    return {"type": "signature", "id": 0, "kind": "operator", "op": "aten.x.y", "args": [{"tensor": tensor}]}


@pytest.mark.parametrize(
    "record",
    [
        {
            "type": "calls",
            "thread": 0,
            "start_ns": 0,
            "signature": ["a"],
            "scope": [],
            "after_ns": [],
            "duration_ns": [],
        },
        {"type": "signature", "id": 0, "kind": "operator", "op": "aten.x.y", "args": [{"float": 1.5}]},
        {"type": "values", "id": 0, "model": "exact", "data": []},
        _signature_of({"made_of": {"per_tensor": {"scale": 0.5}}}),
        {"type": "header", "format": "other", "version": "1.0"},
    ],
)
def test_schema_rejects_invalid_records(record: dict[str, Any]) -> None:
    assert not jsonschema.Draft202012Validator(SCHEMA).is_valid(record)
