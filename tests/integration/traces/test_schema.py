"""Tests that the JSON Schema matches the writer's output."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from example_trace import write
from programs import ROOT
from unusual_tensors import ALL

from opgrip.capture import Capture
from opgrip.cli.output_files import read_chunks

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
