"""The project's own files agree with each other."""

from __future__ import annotations

from programs import ROOT
from project_files import ROOMS, pyproject


def test_the_package_list_is_that_of_the_folders() -> None:
    listed = set(pyproject()["tool"]["setuptools"]["packages"])
    folders = {path.parent for room in ROOMS for path in (ROOT / room).rglob("*.py")}
    assert listed == {"opgrip." + ".".join(folder.relative_to(ROOT).parts) for folder in folders}
