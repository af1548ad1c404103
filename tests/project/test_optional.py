"""What tests can do without is what the extras install, and is asked for in one way."""

from __future__ import annotations

import re

import optional
import pytest
from programs import ROOT
from project_files import pyproject

MODULES_OF = {
    "mmsegmentation": "mmseg",
    "nvidia-ml-py": "pynvml",
    "absl-py": "absl",
    "apache-tvm": "tvm",
    "apache-tvm-ffi": "tvm_ffi",
    "tensorflow-cpu": "tensorflow",
}
"""Modules of the distributions that have another name."""

EVERYBODY = ("dev",)
"""Extras that `make test` installs: what stands in them is not optional there."""

OF_NO_EXTRA = ("PIL", "nsys")
"""What no extra and no target installs."""

IN_A_WAY_OF_ITS_OWN = re.compile(r"importorskip|find_spec|shutil\.which|except (ImportError|ModuleNotFoundError)")


def distribution(requirement: str) -> str:
    return re.split(r"[\[<>=~!; ]", requirement, maxsplit=1)[0]


def modules_of_extras() -> dict[str, set[str]]:
    """What each module's extras are called."""
    extras: dict[str, set[str]] = {}
    for extra, requirements in pyproject()["project"]["optional-dependencies"].items():
        for name in map(distribution, requirements):
            if name != "opgrip" and extra not in EVERYBODY:
                extras.setdefault(MODULES_OF.get(name, name), set()).add(extra)
    return extras


def test_each_module_of_an_extra_may_be_missing() -> None:
    assert sorted(modules_of_extras().keys() - optional.COMMANDS.keys()) == []


@pytest.mark.parametrize("name", optional.COMMANDS)
def test_what_is_said_to_install_a_module_does(name: str) -> None:
    command = optional.COMMANDS[name]
    extras = modules_of_extras().get(name, set())
    if target := re.fullmatch(r"make (\w+)", command):
        # the target installs an extra of the module's, or names it
        recipe = (ROOT / "Makefile").read_text().partition(f"\n$({target[1].upper()}):")[2].partition("\n\n")[0]
        words = set(re.findall(r"[\w-]+", recipe))
        names = {distribution for distribution, module in MODULES_OF.items() if module == name} | {name}
        assert extras & words or names & words or name in optional.BROUGHT_BY_OTHERS
    elif extra := re.fullmatch(r"pip install 'opgrip\[(\w+)\]'", command):
        assert extra[1] in extras or name in optional.BROUGHT_BY_OTHERS
    else:
        assert name in OF_NO_EXTRA


@pytest.mark.parametrize("path", sorted((ROOT / "tests").rglob("*.py")), ids=lambda path: path.name)
def test_tests_ask_for_what_may_be_missing_in_one_way(path: object) -> None:
    if path in (ROOT / "tests/optional.py", ROOT / "tests/project/test_optional.py"):
        return
    assert IN_A_WAY_OF_ITS_OWN.findall(path.read_text()) == []  # type: ignore[attr-defined]


def test_a_test_without_its_package_is_skipped_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optional, "is_installed", lambda name: name != "PIL")
    module = "transformers.loss.loss_for_object_detection"
    assert optional.missing("transformers") is None
    assert optional.missing(module) == "PIL is not installed: pip install pillow"
    with pytest.raises(pytest.skip.Exception, match="PIL is not installed: pip install pillow"):
        optional.optional(module)
    assert optional.needs(module).args == (True,)
    assert optional.needs("transformers").args == (False,)
