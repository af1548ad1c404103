"""Readers of the project's own files."""

import sys
from pathlib import Path
from typing import Any

from programs import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    # pytest depends on it there
    import tomli as tomllib

PACKAGES = ("capture", "replay", "samples", "tools", "traces", "zoo")


def pyproject(folder: Path = ROOT) -> dict[str, Any]:
    return tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
