"""The project's own files agree with each other."""

from __future__ import annotations

import tomllib
from programs import ROOT


def test_the_package_list_is_that_of_the_folders() -> None:
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    rooms = ("capture", "replay", "samples", "tools", "traces")
    folders = {path.parent for room in rooms for path in (ROOT / room).rglob("*.py")}
    assert listed == {"opgrip." + ".".join(folder.relative_to(ROOT).parts) for folder in folders}
