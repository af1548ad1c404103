"""Tests of `opgrip trace convert`: command lines and error messages."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from opgrip.tools.opgrip import main
from opgrip.traces import UserError, load
from opgrip.traces.io.foreign_files import format_of, formats

INPUTS = "Operator: aten.relu.default\ncnt: 3, ((T([2], f32),), {})\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "inputs.txt").write_text(INPUTS)
    return tmp_path


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["trace", "convert", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("out.csv",), "give the format with --to (opgrip, backendbench, "),
        (("out.onnx",), "files can only be read"),
        ((".",), "is a folder: write a file"),
        (("out.x", "--to", "chakraa"), "did you mean chakra?"),
        (("out.x", "--to", "dlop"), "choose one of opgrip, "),
        (("out.x", "--from", "nothing", "--to", "param"), "choose one of "),
    ],
)
def test_unknown_target_lists_the_formats(
    words: tuple[str, ...], expected: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert expected in said(capsys, "inputs.txt", *words)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (("out.x", "--to", "PARAM"), "param"),
        (("out.x", "--to", "Execution-Trace", "--from", "TritonBench"), "execution_trace"),
        (("out.chakra",), "chakra"),
    ],
)
def test_format_names_are_case_insensitive(words: tuple[str, ...], name: str, folder: Path) -> None:
    assert main(["trace", "convert", "inputs.txt", *words]) == 0
    assert format_of(folder / words[0]) == name


def test_all_formats_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["trace", "convert", "--formats"])
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert {"opgrip", *formats.names()} <= rows.keys()
    assert "written" not in rows["onnx"]
    assert ".param.json" in rows["param"]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    "save",
    [
        torch.save,
        lambda module, path: torch.save(module, path, _use_new_zipfile_serialization=False),
        lambda module, path: torch.jit.save(torch.jit.script(module), path),
    ],
)
def test_pickled_model_is_refused_with_the_remedy(save: Any, tmp_path: Path) -> None:
    save(torch.nn.Linear(2, 2), str(tmp_path / "net.pt"))
    with pytest.raises(UserError, match=r"never read: record a run of the model"):
        load(tmp_path / "net.pt")


def test_input_that_is_not_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is a folder: name a file in it"):
        load(tmp_path)
    with pytest.raises(UserError, match="standard input is not read"):
        load("-")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="is a pipe: name a file"):
        load(tmp_path / "pipe")


def test_unconverted_calls_are_printed_without_control_characters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    info = {"input_data_generator": "\u202eabc", "config": [{"input": [{"args": []}]}]}
    (tmp_path / "op.json").write_text(json.dumps({"torch.add": info}))
    assert main(["trace", "convert", str(tmp_path / "op.json"), str(tmp_path / "o.jsonl"), "--from", "param"]) == 0
    errors = capsys.readouterr().err
    assert "torch.add not converted" in errors
    assert "\\u202eabc" in errors
