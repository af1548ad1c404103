"""The project's own files agree with each other."""

from __future__ import annotations

from programs import ROOT
from project_files import ROOMS, pyproject


def test_the_package_list_is_that_of_the_folders() -> None:
    listed = set(pyproject()["tool"]["setuptools"]["packages"])
    folders = {path.parent for room in ROOMS for path in (ROOT / room).rglob("*.py")}
    assert listed == {"opgrip." + ".".join(folder.relative_to(ROOT).parts) for folder in folders}


def test_the_oldest_environment_has_the_lower_bounds() -> None:
    project = pyproject()["project"]
    extras = project["optional-dependencies"]
    bounds = [text for text in (*project["dependencies"], *extras["zstd"], *extras["full"]) if ">=" in text]
    lines = (ROOT / "constraints-oldest.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert {tuple(pin.split("==")) for pin in pins} == {
        (name, ".".join([*version.split("."), "0", "0"][:3])) for name, version in (text.split(">=") for text in bounds)
    }
