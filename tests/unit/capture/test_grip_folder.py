"""Sample folders of gripped functions: they run without the project, and existing files are not overwritten."""

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from types import ModuleType
from typing import Any

import pytest
import torch
from programs import ROOT, run_python

from opgrip.capture.grip import sample_folder
from opgrip.capture.grip.gripped import Gripped, GrippedCall
from opgrip.capture.grip.sample_folder import source_tags, write_folder
from opgrip.errors import UserError
from opgrip.traces.io.sample_folder import open_sample

PROJECT = """
import math
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import torch

from gripped_boxes import shapes

LIMIT = 3


class Coder:
    scale = 2

    def __init__(self, mean):
        self.mean = mean

    @classmethod
    def made(cls, x):
        return cls(x).code(x)

    def code(self, x):
        return (x - self.mean) * self.scale


def area(boxes, pad=0.0):
    if pad:
        boxes = [box + pad for box in boxes]
    return torch.stack([shapes.side(box) ** 2 for box in boxes]).clamp(max=LIMIT)


def grid(size):
    return torch.from_numpy(np.mgrid[:size, :size])


def here(x):
    return x + PLACES[0]


def tangled(x):
    return Tangled.value + x


class Tangled:
    value = import_module("gripped_boxes.shapes").SIDES
"""
SHAPES = """
SIDES = 4


def side(box):
    return box[1] - box[0]
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    path = tmp_path_factory.mktemp("project")
    (path / "gripped_boxes").mkdir()
    (path / "gripped_boxes" / "__init__.py").write_text("")
    (path / "gripped_boxes" / "main.py").write_text(PROJECT)
    (path / "gripped_boxes" / "shapes.py").write_text(SHAPES)
    sys.path.insert(0, str(path))
    try:
        yield importlib.import_module("gripped_boxes.main")
    finally:
        sys.path.remove(str(path))


def gripped(function: Any, *args: Any, owner: type | None = None, **more: Any) -> Gripped:
    entry = function.__qualname__
    call = GrippedCall(args, {}, function(*args), None, None, 2, 1000, 3000)
    return Gripped(function, owner, entry, entry.replace(".", "_"), frozenset({"Reduce"}), [call], **more)


def test_folder_contains_the_module_its_calls_and_a_test(project: ModuleType, tmp_path: Path) -> None:
    folder = write_folder(gripped(project.area, [torch.rand(2)]), tmp_path / "samples")
    assert folder == tmp_path / "samples" / "area"
    names = {path.name for path in folder.iterdir()}
    assert names == {"area.py", "calls.jsonl", "calls.safetensors", "sample.json", "test_area.py"}
    assert (folder / "area.py").read_text() == dedent(
        '''\
        """area of gripped_boxes (gripped_boxes/main.py, line 29), and what it needs."""

        from __future__ import annotations

        import torch

        LIMIT = 3


        def side(box):
            return box[1] - box[0]


        def area(boxes, pad=0.0):
            if pad:
                boxes = [box + pad for box in boxes]
            return torch.stack([side(box) ** 2 for box in boxes]).clamp(max=LIMIT)
        '''
    )
    about = json.loads((folder / "sample.json").read_text())
    assert about["name"] == about["entry"] == "area"
    assert about["tags"] == ["BuiltInDataStructure", "ForLoop", "IfElseBranch", "Reduce"]
    assert about["source"]["module"] == "gripped_boxes.main"
    assert (about["source"]["file"], about["source"]["line"]) == ("gripped_boxes/main.py", 29)
    assert len(about["source"]["sha256"]) == 64
    assert about["calls"] == [{"operators": 2, "operator_ns": 1000, "duration_ns": 3000}]
    assert about["imports"] == ["torch"]
    compile((folder / "test_area.py").read_text(), "test_area.py", "exec")


def test_gripping_twice_keeps_the_folder_unless_calls_or_code_differ(project: ModuleType, tmp_path: Path) -> None:
    one = gripped(project.Coder.code, project.Coder(1), 3, owner=project.Coder)
    first = write_folder(one, tmp_path)
    before = {path: path.read_bytes() for path in first.iterdir()}
    assert write_folder(one, tmp_path) == first
    other = gripped(project.Coder.code, project.Coder(2), 3, owner=project.Coder)
    second = write_folder(other, tmp_path)
    assert second == tmp_path / "Coder_code_2"
    names = {path.name for path in second.iterdir()}
    assert names == {"Coder_code_2.py", "calls.jsonl", "calls.safetensors", "sample.json", "test_Coder_code_2.py"}
    assert write_folder(other, tmp_path) == second
    (tmp_path / "Coder_made").mkdir()
    (tmp_path / "Coder_made" / "mine.txt").write_text("mine")
    made = gripped(vars(project.Coder)["made"].__func__, project.Coder, 3, owner=project.Coder)
    assert write_folder(made, tmp_path) == tmp_path / "Coder_made_2"
    assert {path: path.read_bytes() for path in first.iterdir()} == before
    assert {path.name for path in tmp_path.iterdir()} == {"Coder_code", "Coder_code_2", "Coder_made", "Coder_made_2"}


def test_function_that_cannot_be_extracted_leaves_no_folder(
    project: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = gripped(project.area, [torch.rand(2)])
    project.PLACES = [object()]
    with pytest.raises(UserError, match="PLACES"):
        write_folder(Gripped(project.here, None, "here", "here", frozenset(), []), tmp_path)
    with pytest.raises(UserError, match=r"tangled.py does not run without its project: ModuleNotFoundError"):
        write_folder(gripped(project.tangled, 1), tmp_path)

    def fails(folder: Path, gripped: Gripped) -> None:
        raise UserError("calls cannot be written", "try again")

    monkeypatch.setattr(sample_folder, "write_calls", fails)
    with pytest.raises(UserError, match="calls cannot be written"):
        write_folder(one, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_methods_are_called_with_their_object_or_class_first(project: ModuleType, tmp_path: Path) -> None:
    coder = project.Coder(torch.ones(2))
    sample = open_sample(write_folder(gripped(project.Coder.code, coder, torch.rand(2), owner=project.Coder), tmp_path))
    assert sample.classes["gripped_boxes.main:Coder"].__module__ != "gripped_boxes.main"
    ours = object.__new__(sample.classes["gripped_boxes.main:Coder"])
    ours.mean = coder.mean
    assert torch.equal(sample.function(ours, torch.ones(2) * 3), torch.ones(2) * 4)

    made = vars(project.Coder)["made"].__func__
    sample = open_sample(write_folder(gripped(made, project.Coder, torch.rand(2), owner=project.Coder), tmp_path))
    cls = sample.classes["gripped_boxes.main:Coder"]
    assert torch.equal(sample.function(cls, torch.ones(2)), torch.zeros(2))


def test_by_reference_keeps_the_import_path(project: ModuleType, tmp_path: Path) -> None:
    folder = write_folder(gripped(project.area, [torch.rand(2)], by_reference=True), tmp_path)
    text = (folder / "area.py").read_text()
    assert "from gripped_boxes.main import area\n" in text
    assert "def " not in text
    assert open_sample(folder).function is project.area
    coder = project.Coder(torch.ones(2))
    one = gripped(project.Coder.code, coder, torch.rand(2), owner=project.Coder, by_reference=True)
    sample = open_sample(write_folder(one, tmp_path))
    assert sample.function is project.Coder.code

    def local(x: int) -> int:
        return x

    with pytest.raises(UserError, match="cannot be imported by its name"):
        write_folder(gripped(local, 1, by_reference=True), tmp_path)


@pytest.mark.slow
def test_generated_sample_test_can_pass_and_fail(project: ModuleType, tmp_path: Path) -> None:
    one = gripped(project.Coder.code, project.Coder(torch.ones(2)), torch.rand(2), owner=project.Coder)
    folder = write_folder(one, tmp_path)

    def run() -> subprocess.CompletedProcess[str]:
        return run_python("-m", "pytest", "-q", "-p", "no:cacheprovider", folder, cwd=ROOT)

    assert run().returncode == 0
    code = folder / "Coder_code.py"
    code.write_text(code.read_text().replace("scale = 2", "scale = 3"))
    done = run()
    assert done.returncode == 1
    assert "not close" in done.stdout


def test_tags_come_from_the_function_and_its_helpers(project: ModuleType) -> None:
    assert source_tags(project.area) == {"ForLoop", "IfElseBranch", "BuiltInDataStructure"}
    assert source_tags(project.grid) == {"ThirdPartyCodes"}
    assert source_tags(project.here) == frozenset()
    assert source_tags(torch.relu) == frozenset()
