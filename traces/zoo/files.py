"""Where the files of the zoo's traces lie: beside this code, or in the package `opgrip_zoo`."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

from opgrip.errors import MissingFileError
from opgrip.traces.zoo.manifest import ZooTrace

MODELS = Path(__file__).parent / "models"
PREFIX = "zoo:"
"""What the name of a trace begins with where a file can be."""
SUFFIX = ".jsonl.zst"
PACKAGE = "opgrip_zoo"


def zoo_file(trace: ZooTrace) -> Path:
    """The file of a trace.

    Raises
    ------
    MissingFileError : where it is not installed
    """
    for folder in _folders():
        file = folder / f"{trace.name}{SUFFIX}"
        if file.is_file():
            return file
    raise MissingFileError(
        f"the trace {trace.name} of the zoo is not installed",
        "install the package opgrip-zoo (docs/zoo.md), or opgrip zoo make " + trace.name,
    )


def _folders() -> Iterator[Path]:
    yield MODELS
    package = importlib.util.find_spec(PACKAGE)
    for folder in (package and package.submodule_search_locations) or ():
        yield Path(folder)
