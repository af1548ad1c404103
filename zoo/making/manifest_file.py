"""Writes the manifest of the zoo."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from opgrip.cli.output_files import whole_file
from opgrip.traces.zoo.manifest import FORMAT, MANIFEST, ZooTrace


def write_manifest(traces: Iterable[ZooTrace], path: Path = MANIFEST) -> None:
    """Write a manifest anew."""
    items = [asdict(trace) for trace in traces]
    with whole_file(path, force=True) as file:
        file.write((json.dumps({"format": FORMAT, "traces": items}, indent=1) + "\n").encode())
