"""The command `opgrip`, run as a user runs it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from example_trace import RECORDS, write
from programs import refusal, run_command, succeed

from opgrip.samples import Tag, samples
from opgrip.tools.verbs.trace_info import GROUPS, facts
from opgrip.traces import load


def test_info_shows_the_contents_of_a_trace(detector_trace: Path) -> None:
    done = succeed("opgrip", "trace", "info", detector_trace)
    assert done.stderr == ""
    assert "\x1b" not in done.stdout
    trace = load(detector_trace)
    shown = dict(line.split(maxsplit=1) for line in done.stdout.splitlines()[:10])
    assert shown["model"] == "faster_rcnn, FasterRCNN, builtin:faster_rcnn"
    assert shown["calls"] == f"{len(trace.calls):,}"
    assert shown["signatures"].startswith(f"{len(trace.signatures):,} of ")
    assert shown["dropped"] == "nothing"
    assert trace.summary()["op"][0] in done.stdout
    assert trace.summary("module", "phase")["module"][0] in done.stdout


def test_shares_add_up_to_one_for_every_grouping(detector_trace: Path) -> None:
    trace = load(detector_trace)
    for table in (trace.summary(), *(trace.summary(*group.columns) for group in GROUPS.values())):
        assert table["share"].sum() == pytest.approx(1)
        assert table["share"].is_monotonic_decreasing
        assert table["calls"].sum() == len(trace.calls)


def test_info_shows_dropped_raised_and_nested_calls(tmp_path: Path) -> None:
    done = run_command("opgrip", "trace", "info", write(tmp_path / "t.jsonl"))
    assert "dropped     2 aten.x: ValueError: no" in done.stdout
    assert "raised      mmcv._ext:nms: ValueError: no" in done.stdout
    assert "calls       4, 2 of them inside extension functions" in done.stdout


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"steps": 3, "warmup": 2}, "train, 3 steps after 2 to warm up"),
        ({"steps": 1, "warmup": 0}, "train, 1 step after 0 to warm up"),
        ({"steps": 3, "warmup": 1.5}, "train, 3 steps"),
        ({"steps": True, "warmup": [1]}, "train"),
        ({"steps": 10**30, "warmup": 2}, "train"),
        ({}, "train"),
    ],
)
def test_info_shows_steps_and_warmup_of_a_model(fields: dict[str, Any], words: str) -> None:
    trace = load("trace:faster_rcnn")
    others = {name: value for name, value in trace.header.items() if name not in ("steps", "warmup")}
    changed = replace(trace, header=others | {"model": {"run": "train"}} | fields)
    assert dict(facts(changed))["run"] == words


@pytest.mark.parametrize(
    ("perturbed", "words"),
    [
        # calls of operators with the signatures 0, 0, 1 between marks, and of a gripped function
        ([0, 1, 0, 0, 0, 0], "1 call right after the capture's own work, with times of similar calls"),
        ([1, 1, 0, 0, 1, 1], "1 call right after the capture's own work, with times of similar calls"),
        ([1, 1, 1, 1, 1, 1], "3 calls right after the capture's own work"),
        ([0, 0, 1, 1, 0, 0], "2 calls right after the capture's own work, 1 with times of similar calls"),
        ([1, 0, 0, 0, 1, 1], None),
    ],
)
def test_info_counts_perturbed_calls_without_marks(perturbed: list[int], words: str | None) -> None:
    ops = ["profiler._record_function_enter_new", *["aten.sin.default"] * 3, "profiler._record_function_exit", "m:f"]
    trace = load("trace:faster_rcnn")
    calls = trace.calls.head(len(ops)).assign(
        signature=[2, 0, 0, 1, 3, 4],
        op=pd.Categorical(ops),
        kind=["operator"] * 5 + ["function"],
        perturbed=np.array(perturbed, dtype=bool),
    )
    shown = dict(facts(replace(trace, calls=calls)))
    assert shown["calls"] == "3"
    assert shown.get("perturbed") == words


def test_info_of_a_cut_trace_needs_partial(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", RECORDS[:-1])
    error = refusal("opgrip", "trace", "info", path)
    assert error.startswith("opgrip trace info: error: ")
    done = succeed("opgrip", "trace", "info", path, "--partial")
    assert "incomplete" in done.stdout


def test_info_groups_by_function_and_line(detector_trace: Path) -> None:
    done = succeed("opgrip", "trace", "info", detector_trace, "--by", "function", "--by", "line", "--top", "3")
    assert "functions by share of time" in done.stdout
    assert "lines by share of time" in done.stdout
    assert "opgrip/samples/" in done.stdout


def test_merge_reports_its_output(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl")
    write(tmp_path / "b.jsonl")
    done = run_command("opgrip", "trace", "merge", "a.jsonl", "b.jsonl", "-o", "all.jsonl", cwd=tmp_path)
    merged = load(tmp_path / "all.jsonl")
    counts = f"{len(merged.calls)} calls of {len(merged.signatures)} signatures"
    assert done.stderr == f"opgrip trace merge: wrote {counts} from 2 traces, to all.jsonl\n"


def test_samples_are_listed_one_per_line_and_filtered() -> None:
    lines = run_command("opgrip", "samples", "list").stdout.splitlines()
    assert [line.split("\t")[0] for line in lines] == list(samples())
    views = run_command("opgrip", "samples", "list", "--tag", "viewattribute", "--source", "MMDetection").stdout
    assert 0 < len(views.splitlines()) < len(lines) or len(lines) == 1
    assert all("ViewAttribute" in line and "MMDetection" in line for line in views.splitlines())


def test_sample_is_shown_with_its_inputs_and_source() -> None:
    shown = run_command("opgrip", "samples", "show", "bbox2delta").stdout
    assert "float32[128,4], float32[128,4]" in shown
    assert "https://github.com/open-mmlab/" in shown
    assert "def bbox2delta(" in shown


def test_tags_are_counted() -> None:
    lines = run_command("opgrip", "samples", "tags").stdout.splitlines()
    counts = {line.split()[0]: int(line.split()[1]) for line in lines}
    assert counts == {tag.value: sum(tag in sample.tags for sample in samples().values()) for tag in Tag}
