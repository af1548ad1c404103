"""Tests of the validation of traces and of their differences."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from example_trace import write
from programs import ROOT, SHIPPED_TRACES, TinyNet, captured, run_command, train_tiny_net
from torch import nn
from unusual_tensors import ALL

from opgrip.capture import Capture
from opgrip.cli.output_files import read_chunks
from opgrip.traces import Trace, load
from opgrip.traces.analysis.differences import (
    Tolerances,
    TraceDifference,
    compare_traces,
    statistics_of,
    write_difference,
)
from opgrip.traces.analysis.validation import NOT_INSTALLED, SchemaCheck, validate
from opgrip.traces.schema.tensor_specs import TensorSpec
from opgrip.traces.table.trace import Trace as TraceType
from opgrip.traces.values import fit

Line = dict[str, Any]


def findings(path: Path) -> list[tuple[int, str, str]]:
    return [(item.record, item.kind, item.message) for item in validate(path).findings]


@pytest.mark.slow
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


USUAL = Tolerances()


def compared(before: Trace, after: Trace, tolerances: Tolerances = USUAL) -> TraceDifference:
    return compare_traces(before, after, ("a", "b"), tolerances)


def test_trace_does_not_differ_from_itself(tiny_trace: Path) -> None:
    trace = load(tiny_trace)
    difference = compared(trace, trace)
    assert difference.changed == []
    assert difference.facts == []
    assert sum(row.counts[0] for row in difference.rows) == len(trace.own_calls)
    assert sum(row.shares[0] for row in difference.rows) == pytest.approx(1)


def test_two_captures_of_a_program_have_the_same_signatures(tiny_trace: Path, tmp_path: Path) -> None:
    train_tiny_net(tmp_path / "again.jsonl")
    difference = compared(load(tiny_trace), load(tmp_path / "again.jsonl"), Tolerances(shares=1.0))
    assert [row for row in difference.changed if set(row.kinds) & {"came", "went", "counts"}] == []


def test_added_removed_and_more_frequent_signatures_are_reported(tmp_path: Path) -> None:
    x = torch.randn(8, 8)

    def before() -> None:
        x.relu()
        x.sin()

    def after() -> None:
        x.relu()
        x.relu()
        x[:4].sin()

    traces = [captured(tmp_path, run, f"{run.__name__}.jsonl") for run in (before, after)]
    difference = compared(traces[0], traces[1], Tolerances(shares=1.0))
    kinds = {row.call: row.kinds for row in difference.changed if "slice" not in row.op}
    assert kinds == {
        "aten.relu.default(float32[8,8])": ("counts",),
        "aten.sin.default(float32[8,8])": ("went",),
        "aten.sin.default(float32[4,8])": ("came",),
    }


@pytest.mark.parametrize(
    ("other", "statistics"),
    [
        (lambda x: x, set()),
        (lambda x: x.masked_fill(x > 0.5, float("nan")), {"nan"}),
        (lambda x: x.relu(), {"zeros"}),
    ],
)
def test_changed_values_are_reported(
    tmp_path: Path, other: Callable[[torch.Tensor], torch.Tensor], statistics: set[str]
) -> None:
    x = torch.randn(64, 64)
    traces = [
        captured(tmp_path, lambda values=values: values.sin(), f"{place}.jsonl")
        for place, values in enumerate((x, other(x).clone()))
    ]
    difference = compared(traces[0], traces[1])
    (row,) = difference.rows
    assert statistics <= {name for _, name, _, _ in row.values}
    assert ("values" in row.kinds) == bool(statistics)


def test_statistics_do_not_generate_huge_tensors() -> None:
    huge = TensorSpec((1 << 40, 1 << 20), (1 << 20, 1), torch.float32, "cpu")
    model = fit(torch.randn(100))
    assert model is not None
    assert statistics_of(model, huge)["mean"] == pytest.approx(0, abs=0.3)


def test_json_has_all_rows_and_markdown_the_changed_ones(tiny_trace: Path, tmp_path: Path) -> None:
    before = load(tiny_trace)
    after = captured(tmp_path, lambda: TinyNet().eval()(torch.randn(2, 3, 8, 8), torch.ones(2, 6).long()))
    difference = compared(before, after)
    write_difference(difference, tmp_path / "d.json", force=False)
    form = json.loads((tmp_path / "d.json").read_text())
    assert len(form["signatures"]) == len(difference.rows)
    assert form["counts"]["went"] == len(difference.of_kind("went")) > 0
    write_difference(difference, tmp_path / "d.md", force=False)
    text = (tmp_path / "d.md").read_text()
    heads = 2 + 2 * bool(difference.operators)
    assert text.count("\n| ") == len(difference.changed) + len(difference.operators) + heads


def test_names_of_a_trace_cannot_break_a_markdown_table(tiny_trace: Path, tmp_path: Path) -> None:
    trace: TraceType = load(tiny_trace)
    strange = [replace(item, op=f"{item.op}|`<b>\n|") for item in trace.signatures]
    difference = compared(trace, replace(trace, signatures=strange))
    write_difference(difference, tmp_path / "d.md", force=False)
    rows = [line for line in (tmp_path / "d.md").read_text().splitlines() if line.startswith(("| came", "| went"))]
    assert len(rows) == len(difference.changed)
    assert all(line.replace("\\|", "").count("|") == 6 for line in rows)
    assert not any("<b>" in line for line in rows)


def test_diff_verb_prints_changes_and_fails_on_request(tiny_trace: Path, tmp_path: Path) -> None:
    with Capture(tmp_path / "t.jsonl"):
        nn.functional.relu(torch.randn(3, 3))
    same = run_command("opgrip", "trace", "diff", tiny_trace, tiny_trace, "--fail-on", "any")
    assert (same.returncode, same.stderr) == (0, "")
    assert "came 0, went 0, counts 0, shares 0, values 0" in same.stdout
    other = run_command(
        *("opgrip", "trace", "diff", tiny_trace, "t.jsonl", "--fail-on", "came,values", "-o", "d.md"), cwd=tmp_path
    )
    assert other.returncode == 1
    assert "aten.relu.default(float32[3,3])" in other.stdout
    assert (tmp_path / "d.md").exists()


def test_counts_are_per_step_if_steps_are_recorded(tmp_path: Path) -> None:
    x = torch.randn(8, 8)
    for name, steps in (("one", 1), ("three", 3)):
        with Capture(tmp_path / f"{name}.jsonl", details={"steps": steps}):
            for _ in range(steps):
                x.relu()
                x.sin()
    difference = compared(load(tmp_path / "one.jsonl"), load(tmp_path / "three.jsonl"), Tolerances(shares=1.0))
    assert (difference.unit, difference.units) == ("step", (1, 3))
    assert difference.changed == []


def test_folders_are_compared_and_shifts_are_reported_by_operator(tmp_path: Path) -> None:
    x = torch.randn(64, 64)
    for day, more in (("monday", 0), ("friday", 9)):
        (tmp_path / day).mkdir()
        for part, length in enumerate((3, 5)):
            with Capture(tmp_path / day / f"{part}.jsonl", private=True, salt_file=tmp_path / "salt"):
                for _ in range(length):
                    x.relu()
                    for _ in range(more):
                        x.cumsum(0)
    done = run_command(
        "opgrip", "trace", "diff", "monday", "friday", "-o", "d.json", "--fail-on", "operators", cwd=tmp_path
    )
    assert done.returncode == 1, done.stderr
    assert "operators with a changed share" in done.stdout
    form = json.loads((tmp_path / "d.json").read_text())
    assert form["per"] == {"unit": "call", "a": 8, "b": 80}
    shares = {row["op"]: row["call_shares"] for row in form["operators"]}
    assert shares["aten.cumsum.default"] == [0, pytest.approx(0.9)]
    assert form["counts"]["came"] == 1


def test_signature_numbers_do_not_affect_the_difference(tiny_trace: Path) -> None:
    trace = load(tiny_trace)
    turned = {item.number: 1000 - item.number for item in trace.signatures}
    calls = trace.calls.assign(signature=trace.calls["signature"].map(turned))
    signatures = [replace(item, number=turned[item.number]) for item in reversed(trace.signatures)]
    assert compared(trace, replace(trace, calls=calls, signatures=signatures)).changed == []
