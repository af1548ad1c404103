"""Suggestions of names similar to what a user typed, and shipped traces by name."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from programs import ROOT, SHIPPED_TRACES, refusal, run_command, succeed

from opgrip.cli.command import nearest
from opgrip.traces import load
from opgrip.traces.io.shipped_traces import shipped_traces

TRACE = SHIPPED_TRACES[0]


def test_nearest_names_match_the_start_of_a_name_or_of_its_last_part() -> None:
    operators = ["aten.add.Tensor", "aten.index.Tensor", "aten.sort.default", "torchvision.nms.default"]
    assert nearest("aten.adn*", operators)[0] == "aten.add.Tensor"
    assert nearest("nmz*", operators)[0] == "torchvision.nms.default"
    assert nearest("*.indx*", operators)[0] == "aten.index.Tensor"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            "opreplay https://example.com/net.onnx",
            "https://example.com/net.onnx is a URL, not a file: download it first",
        ),
        ("opreplay trace:fster_rcnn", "opgrip ships no trace 'fster_rcnn': did you mean faster_rcnn?"),
        ("opreplay traces/faster_rcnn.jsonl", "no such file or directory, and trace:faster_rcnn is one that ships"),
        ("opreplay stp.jsonl", "no such file or directory: did you mean step.jsonl?"),
        (
            "opreplay opinfo:all",
            "a model is recorded first: opcapture --model opinfo:all; names that are not files are",
        ),
        ("opreplay TRACE --tpo 3", "opreplay: error: unknown option --tpo: did you mean --top?"),
        ("opreplay TRACE --mode compil", "unknown mode 'compil': did you mean compile"),
        ("opreplay TRACE --op aten.adn*", "no op matches --op aten.adn*: the trace has 'aten.add.Tensor'"),
        ("opreplay TRACE --unit function --op delta2box", "the trace has 'delta_xywh_bbox_coder:delta2bbox'"),
        ("opreplay samples/nmz", "unknown sample 'nmz': did you mean nms?"),
        ("opcapture --modle x.py", "opcapture: error: unknown option --modle: did you mean --model?"),
        ("opgrip trase info", "opgrip: error: argument VERB: invalid choice 'trase': did you mean trace?"),
    ],
)
def test_misspelled_name_is_answered_with_the_right_one(tmp_path: Path, command: str, message: str) -> None:
    (tmp_path / "step.jsonl").touch()
    name, *words = command.replace("TRACE", str(TRACE)).split()
    assert message in refusal(name, *words, cwd=tmp_path, in_one_line=True)


def test_folder_without_samples_is_reported_and_its_traces_are_replayed(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    error = refusal("opreplay", "runs", cwd=tmp_path)
    assert "runs is a folder without samples: name a trace, or a folder that opgrip grip wrote" in error
    (tmp_path / "runs" / "a.jsonl.gz").touch()
    errors = run_command("opreplay", "runs", cwd=tmp_path).stderr
    assert "a: not replayed: runs/a.jsonl.gz is not a trace" in errors


def test_files_are_accepted_before_and_after_options(tiny_trace: Path, tmp_path: Path) -> None:
    shutil.copy(tiny_trace, tmp_path / "a.jsonl")
    shutil.copy(tiny_trace, tmp_path / "b.jsonl")
    done = run_command("opgrip", "trace", "validate", "a.jsonl", "--unbounded", "b.jsonl", cwd=tmp_path)
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == ["a.jsonl", "b.jsonl"]
    done = run_command("opgrip", "trace", "info", "a.jsonl", "--unbounded", "b.jsonl", cwd=tmp_path)
    assert (done.returncode, "unexpected argument: 'b.jsonl'" in done.stderr) == (2, True)
    done = run_command("opgrip", "trace", "validate", "a.jsonl", "--unbounded", "b.jsonl", "--jsn", cwd=tmp_path)
    assert (done.returncode, "unknown option --jsn" in done.stderr) == (2, True)


@pytest.mark.slow
def test_shipped_trace_is_found_from_any_folder(tmp_path: Path) -> None:
    done = succeed("opgrip", "trace", "info", "trace:faster_rcnn", "--top", "1", cwd=tmp_path)
    assert f"calls       {len(load('trace:faster_rcnn').calls):,}" in done.stdout
    fast = ("--iterations", "1", "--warmup", "0", "--op", "aten.relu*", "--top", "1", "-o", "r.json")
    succeed("opreplay", "trace:faster_rcnn", *fast, cwd=tmp_path)
    assert set(shipped_traces().values()) == {*SHIPPED_TRACES, ROOT / "traces" / "zoo_500.jsonl.gz"}
