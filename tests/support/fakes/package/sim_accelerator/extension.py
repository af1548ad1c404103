"""C++ extension of the device, and its build."""

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import torch
from optional import missing

SIMULATED = Path(__file__).resolve().parents[2]
SOURCES = sorted((SIMULATED / "csrc").glob("*.cpp"))
NAME = "sim_accelerator_extension"
FOLDER = SIMULATED.parents[2] / "build" / "simulated" / f"{sys.implementation.cache_tag}-torch{torch.__version__}"


def missing_tool() -> str | None:
    """Return the tool that a build lacks, or None if the extension is built or can be built."""
    return None if is_built() else missing("c++") or missing("ninja")


@cache
def load_extension() -> ModuleType:
    """Return the extension, which registers its device with torch."""
    spec = importlib.util.spec_from_file_location(NAME, FOLDER / f"{NAME}.so")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def is_built() -> bool:
    """Return True if the extension is newer than its sources."""
    built = FOLDER / f"{NAME}.so"
    files = [*SOURCES, *(SIMULATED / "csrc").glob("*.h")]
    return built.is_file() and built.stat().st_mtime >= max(file.stat().st_mtime for file in files)


def build() -> None:
    # saves seconds in each process that uses the extension
    from torch.utils.cpp_extension import load

    FOLDER.mkdir(parents=True, exist_ok=True)
    load(NAME, [str(path) for path in SOURCES], ["-O1", "-g0"], build_directory=str(FOLDER))
