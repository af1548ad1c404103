"""Packages other than opgrip whose entry points opgrip finds."""

import os
from collections.abc import Mapping
from pathlib import Path

from programs import SUPPORT_PATH

FAILS = 999_999  # Budget with which the analysis in planted_parts.py fails.


def with_package(site: Path, groups: Mapping[str, str]) -> dict[str, str]:
    information = site / "planted-1.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 1.0\n")
    entries = "".join(f"[{group}]\nplanted = {module}\n" for group, module in groups.items())
    (information / "entry_points.txt").write_text(entries)
    paths = [str(site), SUPPORT_PATH, os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
