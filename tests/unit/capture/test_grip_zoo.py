"""Long-tail functions of mmdet and mmseg, extracted from them, return the same results."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from grip_exchange import run_all, write
from grip_zoo import COMPILED, ZOO, Specimen, gripped
from optional import optional

from opgrip.capture.grip.sample_folder import check_names
from opgrip.capture.grip.source.module import ModuleText, lay_out, requirements_of

optional("mmdet")
optional("mmseg")


def extract(one: Specimen, folder: Path) -> ModuleText:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = gripped(one)
        made = lay_out(found, requirements_of(found), "a test")
    check_names(made.text, made.absent)
    write(folder, found, made)
    return made


@pytest.mark.slow
def test_extracted_functions_run_without_their_projects(tmp_path: Path) -> None:
    made = {one.name: extract(one, tmp_path / one.name) for one in ZOO}
    assert {name for one in made.values() for name in one.imports} <= {"numpy", "scipy", "torch"}
    found = run_all([tmp_path / name for name in made], ["mmdet", "mmseg", "mmengine", "mmcv"])
    assert {folder: wrong for folder, wrong in found.items() if wrong} == {}


@pytest.mark.slow
def test_compiled_functions_of_a_framework_remain_imports(tmp_path: Path) -> None:
    made = {one.name: extract(one, tmp_path / one.name) for one in COMPILED}
    assert all("mmcv" in one.imports for one in made.values())
    found = run_all([tmp_path / name for name in made], ["mmdet", "mmseg"])
    assert {folder: wrong for folder, wrong in found.items() if wrong} == {}
