"""The project's own files, its two wheels installed together, and a package with a plug-in of each kind."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest
from optional import EVERYBODY
from outside import FAILS, with_package
from programs import ROOT, run_command, run_python, succeed
from project_files import PACKAGES, pyproject

import opgrip
from opgrip.cli.plugins import MissingPackageError, install_command, needed
from opgrip.traces.zoo import read_manifest


def test_every_top_level_package_is_linked_from_the_import_package() -> None:
    for package in PACKAGES:
        link = ROOT / "opgrip" / package
        assert link.is_symlink()
        assert link.resolve() == ROOT / package


def test_public_names_are_loaded_on_first_use() -> None:
    code = "import sys, opgrip; print('torch' in sys.modules, opgrip.__version__)"
    done = run_python("-c", code, fresh=True)
    assert done.stdout.split() == ["False", pyproject()["project"]["version"]]
    for name in opgrip.__all__:
        assert getattr(opgrip, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'no_such'"):
        opgrip.no_such  # noqa: B018


def test_oldest_constraints_equal_the_lower_bounds() -> None:
    project = pyproject()["project"]
    requirements = [*project["dependencies"], *chain(*(project["optional-dependencies"][extra] for extra in EVERYBODY))]
    bounds = dict(text.split(">=") for text in requirements if ">=" in text)
    lines = (ROOT / "constraints-oldest.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert bounds.keys() == pins.keys()
    # a bound of 1.11 allows any 1.11.x
    assert [name for name, bound in bounds.items() if not f"{pins[name]}.".startswith(f"{bound}.")] == []


def test_required_packages_are_installed_by_all_targets() -> None:
    extras = pyproject()["project"]["optional-dependencies"]
    dev = next(requirement for requirement in extras["dev"] if requirement.startswith("opgrip["))
    assert set(EVERYBODY) <= set(re.findall(r"\w+", dev))
    targets = re.findall(r"-e '\.\[([\w,]+)\]'", (ROOT / "Makefile").read_text())
    assert len(targets) > 1
    for installed in targets:
        assert "dev" in installed.split(",") or set(EVERYBODY) <= set(installed.split(","))


def test_missing_packages_are_installed_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    extras = pyproject()["project"]["optional-dependencies"]
    for extra in ("plot", "onnx", "gpu"):
        assert shlex.split(install_command(extra)) == ["pip", "install", *extras[extra]]
    assert set(shlex.split(install_command("tensorflow"))) >= {*extras["xla"], "absl-py"}
    assert install_command("no-such-extra") == ""
    monkeypatch.setattr("opgrip.cli.plugins.requires", lambda name: None)
    with pytest.raises(MissingPackageError, match=r"^no_such is not installed: pip install no_such$"):
        needed("no_such.part", "plot")


FAST = ("--iterations", "2", "--warmup", "0")
CALL = """
if __name__ == "__main__":
    from opgrip.replay import replay
    results = replay("powers:2", most_us=1, iterations=2, warmup=0)
    print(list(results.frame["op"]), (results.frame["over_us"] >= 0).all())
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    parts = dict.fromkeys(("opgrip.analyses", "opgrip.sources", "opgrip.reports"), "planted_parts")
    return with_package(tmp_path_factory.mktemp("parts"), {**parts, "opgrip.modes": "planted_modes"})


@pytest.mark.slow
def test_plugins_of_another_package_work_together(tmp_path: Path, environment: dict[str, str]) -> None:
    options = (*FAST, "--mode", "planted-same", "--most-us", "1", "-o", tmp_path / "out.json")
    done = succeed("opreplay", "powers:3", *options, env=environment)
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["most_us"] == 1
    assert [(row["op"], row["mode"]) for row in document["results"]] == [
        (f"pow{number}", mode) for number in range(3) for mode in ("eager", "planted-same")
    ]
    assert all(row["over_us"] == max(0.0, row["median_us"] - 1) for row in document["results"])
    assert "over us" in done.stdout
    assert "of 6 rows are over the budget" in done.stdout


@pytest.mark.slow
def test_result_format_of_a_plugin_is_written(tmp_path: Path, environment: dict[str, str]) -> None:
    options = (*FAST, "--top", "1", "--most-us", "5", "-o", tmp_path / "out.tally")
    succeed("opreplay", "powers:2", *options, env=environment)
    assert (tmp_path / "out.tally").read_text() == "powers:2 5 pow0\n"


def test_plugin_options_are_in_the_help_and_refused_without_effect(environment: dict[str, str]) -> None:
    shown = run_command("opreplay", "--help-all", env=environment).stdout
    assert "budgets:" in shown
    assert "--most-us US" in shown
    refused = run_command("opreplay", "powers:2", "--tag", "x", env=environment)
    assert (refused.returncode, refused.stderr) == (
        2,
        "opreplay: error: --tag is for samples: leave it out with powers\n",
    )


@pytest.mark.slow
def test_plugin_options_are_keywords_of_replay(tmp_path: Path, environment: dict[str, str]) -> None:
    script = tmp_path / "call.py"
    script.write_text(CALL)
    done = run_python(script, env=environment, fresh=True)
    assert (done.returncode, done.stdout) == (0, "['pow0', 'pow1'] True\n"), done.stderr


@pytest.mark.slow
def test_failing_analysis_loses_no_row(tmp_path: Path, environment: dict[str, str]) -> None:
    output = tmp_path / "out.json"
    options = (*FAST, "-o", output)
    done = run_command("opreplay", "powers:3", *options, "--most-us", str(FAILS), env=environment)
    assert (done.returncode, output.exists()) == (2, False)
    assert "opreplay: error: no budget is so large: name another" in done.stderr
    again = succeed("opreplay", "powers:3", *options, "--resume", env=environment)
    assert "replaying 0 cases" in again.stderr
    assert len(json.loads(output.read_text())["results"]) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


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
