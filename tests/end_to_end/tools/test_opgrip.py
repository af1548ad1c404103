"""The command `opgrip`, run as a user runs it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from example_trace import RECORDS, write
from programs import refusal, run_command, succeed

from opgrip.samples import samples
from opgrip.tools.verbs.trace_info import facts
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


def test_info_shows_dropped_raised_and_nested_calls(tmp_path: Path) -> None:
    done = run_command("opgrip", "trace", "info", write(tmp_path / "t.jsonl"))
    assert "dropped     2 aten.x: ValueError: no" in done.stdout
    assert "raised      mmcv._ext:nms: ValueError: no" in done.stdout
    assert "calls       4, 2 of them inside extension functions" in done.stdout


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"steps": 3, "warmup": 2}, "train, 3 steps after 2 to warm up"),
        ({"steps": True, "warmup": [1]}, "train"),
        ({}, "train"),
    ],
)
def test_info_shows_steps_and_warmup_of_a_model(fields: dict[str, Any], words: str) -> None:
    trace = load("trace:faster_rcnn")
    others = {name: value for name, value in trace.header.items() if name not in ("steps", "warmup")}
    changed = replace(trace, header=others | {"model": {"run": "train"}} | fields)
    assert dict(facts(changed))["run"] == words


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


@pytest.mark.parametrize("words", [(), ("trace",)])
def test_command_without_a_verb_prints_its_help(words: tuple[str, ...]) -> None:
    error = refusal("opgrip", *words)
    assert error.startswith("usage: opgrip")
    assert "export-case" in error
