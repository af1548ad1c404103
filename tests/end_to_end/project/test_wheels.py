"""The two wheels, built and installed together: the tool with a few traces, and all traces of the zoo."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from programs import ROOT
from project_files import pyproject

from opgrip.traces.zoo import read_manifest

MADE = [trace.name for trace in read_manifest() if trace.recording is not None]
OF_THE_TOOL = [
    Path(name).name.partition(".jsonl")[0]
    for name in pyproject()["tool"]["setuptools"]["package-data"]["opgrip.traces.zoo"]
    if name.startswith("models/")
]
# Trace of the README's first command, and the baseline times of the zoo's score.
DISTILLED, BASELINE = "traces/zoo_500.jsonl.gz", "traces/zoo/baseline.json.zst"
INSTALLED = """
from opgrip.traces import load
from opgrip.errors import MissingFileError
from opgrip.traces.zoo import read_manifest, zoo_file
for trace in read_manifest():
    try:
        print(trace.name, zoo_file(trace).parent.name)
    except MissingFileError:
        pass
assert len(load("zoo:built-in_faster-rcnn.predict").calls)
"""


def install(source: Path, folder: Path, *options: str) -> None:
    """Build a wheel and install it into a folder without network access."""
    words = (
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
    )
    done = subprocess.run(
        [sys.executable, *words, "--target", folder, *options, source], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def traces_in(folder: Path) -> dict[str, str]:
    """Return the zoo traces that packages installed in a folder contain, each with its folder."""
    env = os.environ | {"PYTHONPATH": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", INSTALLED], cwd=folder, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return dict(line.split() for line in done.stdout.splitlines())


@pytest.mark.slow
def test_tool_wheel_has_a_few_traces_and_zoo_wheel_has_all(tmp_path: Path) -> None:
    sources, folder = tmp_path / "sources", tmp_path / "installed"
    unwanted = shutil.ignore_patterns(
        ".*", "build", "demo", "dist", "results", "*.egg-info", "__pycache__", "tests", "docs"
    )
    # build in a copy: setuptools leaves its copies in the folder
    shutil.copytree(ROOT, sources, ignore=unwanted)
    install(sources, folder)
    assert sorted(traces_in(folder)) == sorted(OF_THE_TOOL)
    for name in (DISTILLED, BASELINE):
        assert (folder / "opgrip" / name).read_bytes() == (ROOT / name).read_bytes()
    install(sources / "traces" / "zoo" / "models", folder)
    traces = traces_in(folder)
    assert sorted(traces) == sorted(MADE)
    assert {traces[name] for name in MADE if name not in OF_THE_TOOL} <= {"opgrip_zoo"}


def test_both_wheels_have_one_version_and_the_zoo_requires_opgrip() -> None:
    zoo = pyproject(ROOT / "traces" / "zoo" / "models")["project"]
    assert zoo["version"] == pyproject()["project"]["version"]
    assert zoo["dependencies"] == ["opgrip"]


@pytest.mark.slow
def test_files_of_pytest_that_pip_leaves_do_not_hide_an_editable_installation(tmp_path: Path) -> None:
    sources, folder = tmp_path / "sources", tmp_path / "installed"
    for name in ("opgrip", "src"):
        shutil.copytree(ROOT / name, sources / name, symlinks=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources)
    install(sources, folder, "-e")
    # pytest compiles all modules of a package with a plug-in, and pip removes only files that it installed
    compiled = folder / "opgrip" / "__pycache__" / "__init__.cpython-311-pytest-9.2.0.pyc"
    compiled.parent.mkdir(parents=True)
    compiled.touch()
    code = f"import site; site.addsitedir({str(folder)!r}); import opgrip; print(opgrip.__file__)"
    done = subprocess.run([sys.executable, "-ISc", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == str(sources / "src" / "opgrip" / "__init__.py"), done.stderr
