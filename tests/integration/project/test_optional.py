"""Tests that optional packages of the test suite come from extras, and are requested in one way."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import optional
import pytest
from programs import ROOT
from project_files import pyproject

from opgrip.cli.plugins import MissingPackageError, install_command, needed

# modules of distributions with another name
MODULES_OF = {
    "mmsegmentation": "mmseg",
    "nvidia-ml-py": "pynvml",
    "absl-py": "absl",
    "apache-tvm": "tvm",
    "apache-tvm-ffi": "tvm_ffi",
    "tensorflow-cpu": "tensorflow",
    "axe-playwright-python": "axe_playwright_python",
    "mkdocs-material": "material",
}

# modules that no extra and no make target installs
OF_NO_EXTRA = ("PIL", "flashinfer_bench", "nsys", "ncu", "c++", "ninja", "chromium")

IN_A_WAY_OF_ITS_OWN = re.compile(r"importorskip|find_spec|shutil\.which|except (ImportError|ModuleNotFoundError)")


def distribution(requirement: str) -> str:
    return re.split(r"[\[<>=~!; ]", requirement, maxsplit=1)[0]


def all_extras() -> dict[str, list[str]]:
    extras: dict[str, list[str]] = pyproject()["project"]["optional-dependencies"]
    return extras


def modules_of_extras() -> dict[str, set[str]]:
    """Return the names of the extras of each optional module."""
    extras: dict[str, set[str]] = {}
    for extra, requirements in all_extras().items():
        for name in map(distribution, requirements):
            if name != "opgrip":
                extras.setdefault(MODULES_OF.get(name, name), set()).add(extra)
    return {module: names for module, names in extras.items() if names.isdisjoint({"dev", *optional.EVERYBODY})}


def test_required_packages_are_installed_by_all_targets() -> None:
    dev = next(requirement for requirement in all_extras()["dev"] if distribution(requirement) == "opgrip")
    assert set(optional.EVERYBODY) <= set(re.findall(r"\w+", dev))
    targets = re.findall(r"-e '\.\[([\w,]+)\]'", (ROOT / "Makefile").read_text())
    assert len(targets) > 1
    for extras in targets:
        assert "dev" in extras.split(",") or set(optional.EVERYBODY) <= set(extras.split(","))


def test_each_module_of_an_extra_may_be_missing() -> None:
    assert sorted(modules_of_extras().keys() - optional.COMMANDS.keys()) == []


@pytest.mark.parametrize("name", optional.COMMANDS)
def test_install_command_installs_its_module(name: str) -> None:
    command = optional.COMMANDS[name]
    extras = modules_of_extras().get(name, set())
    if target := re.fullmatch(r"make (\w+)", command):
        # the target installs an extra of the module, or names it
        recipe = (ROOT / "Makefile").read_text().partition(f"\n$({target[1].upper()}):")[2].partition("\n\n")[0]
        words = set(re.findall(r"[\w-]+", recipe))
        names = {distribution for distribution, module in MODULES_OF.items() if module == name} | {name}
        assert extras & words or names & words or name in optional.BROUGHT_BY_OTHERS
    elif extra := re.fullmatch(r"pip install '\.\[(\w+)\]'", command):
        assert extra[1] in extras or name in optional.BROUGHT_BY_OTHERS
    else:
        assert name in OF_NO_EXTRA


def test_tests_request_optional_packages_in_one_way() -> None:
    paths = {*(ROOT / "tests").rglob("*.py")} - {Path(__file__), Path(optional.__file__)}
    assert len(paths) > 100
    assert [path for path in paths if IN_A_WAY_OF_ITS_OWN.search(path.read_text())] == []


def test_missing_packages_are_installed_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for extra in ("plot", "onnx", "gpu"):
        command = install_command(extra)
        assert shlex.split(command) == ["pip", "install", *all_extras()[extra]]
    assert set(shlex.split(install_command("tensorflow"))) >= {*all_extras()["xla"], "absl-py"}
    assert install_command("no-such-extra") == ""
    monkeypatch.setattr("opgrip.cli.plugins.requires", lambda name: None)
    with pytest.raises(MissingPackageError, match=r"^no_such is not installed: pip install no_such$"):
        needed("no_such.part", "plot")
