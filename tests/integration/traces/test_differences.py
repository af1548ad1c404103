"""Differences between two traces by signature, independent of the signatures' numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from programs import TinyNet, captured, run_command, train_tiny_net
from torch import nn

from opgrip.capture import Capture
from opgrip.traces import Trace, load
from opgrip.traces.analysis.differences import (
    Tolerances,
    TraceDifference,
    compare_traces,
    statistics_of,
    write_difference,
)
from opgrip.traces.schema.tensor_specs import TensorSpec
from opgrip.traces.table.trace import Trace as TraceType
from opgrip.traces.values import fit

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
