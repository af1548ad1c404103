"""The project's own files, read."""

from __future__ import annotations

import sys
from typing import Any

from programs import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    # comes with pytest there
    import tomli as tomllib

ROOMS = ("capture", "replay", "samples", "tools", "traces")


def pyproject() -> dict[str, Any]:
    """What pyproject.toml says."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
