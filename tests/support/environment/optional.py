"""Optional packages and programs of tests, with the command that installs each."""

import importlib
import importlib.util
import shutil
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import pytest

from opgrip.errors import UserError
from opgrip.replay.modes import find_mode

OPENMMLAB = "make openmmlab"
RUNTIMES = "make runtimes"
TRANSFORMERS = "pip install '.[transformers]'"

# Extras that all targets of the Makefile install, as `dev` includes them: their packages must be present.
EVERYBODY = ("chakra", "excel", "report", "plot", "schema")

# installation command of each module or program
COMMANDS = {
    **dict.fromkeys(("mmdet", "mmseg", "mmcv", "mmengine", "cv2", "pycocotools", "shapely"), OPENMMLAB),
    **dict.fromkeys(("terminaltables", "six", "tqdm", "prettytable", "wcwidth", "ftfy", "regex"), OPENMMLAB),
    **dict.fromkeys(("jax", "torchax", "onnx", "onnxscript", "onnxruntime", "tvm", "tvm_ffi", "psutil"), RUNTIMES),
    **dict.fromkeys(("cloudpickle", "tensorflow", "absl", "ray", "triton", "fastapi", "uvicorn", "httpx"), RUNTIMES),
    **dict.fromkeys(("transformers", "tokenizers"), TRANSFORMERS),
    **dict.fromkeys(("playwright", "axe_playwright_python", "nbclient", "nbformat", "ipykernel"), "make browser"),
    **dict.fromkeys(("mkdocs", "material", "mkdocstrings"), "make docs"),
    "expecttest": "pip install '.[opinfo]'",
    "pynvml": "pip install '.[gpu]'",
    "chromium": "install Chromium",
    "atheris": "pip install '.[fuzz]'",
    "PIL": "pip install pillow",
    "flashinfer_bench": "pip install flashinfer-bench",
    "nsys": "install NVIDIA Nsight Systems",
    "ncu": "install NVIDIA Nsight Compute",
    "c++": "install a C++ compiler",
    "ninja": "pip install ninja, or install it with the system",
}

# names in `COMMANDS` that are programs on the PATH, not modules
PROGRAMS = ("nsys", "ncu", "c++", "ninja", "chromium")

# Modules that others need for use, although those import without them.
NEEDS_OF = {
    "transformers.loss.loss_for_object_detection": ("PIL",),
    "transformers.models.detr.image_processing_pil_detr": ("PIL",),
    "mmdet": ("mmcv",),
    "mmseg": ("mmcv",),
}


def needs(*names: str) -> pytest.MarkDecorator:
    """Return a mark that skips a test if one of these modules or programs is missing, and reports how to install it."""
    reason = next((reason for name in names if (reason := missing(name))), None)
    return pytest.mark.skipif(reason is not None, reason=reason or "")


def needs_mode(name: str) -> pytest.MarkDecorator:
    reason = missing_mode(name)
    return pytest.mark.skipif(reason is not None, reason=reason or "")


def optional(name: str) -> ModuleType:
    """Import and return a module; if it or a dependency is missing, skip the running test or file."""
    if (reason := missing(name)) is not None:
        pytest.skip(reason, allow_module_level=True)
    return importlib.import_module(name)


def missing(name: str) -> str | None:
    """Return the package that a module lacks, itself or a dependency, and how to install it, or None."""
    root = name.partition(".")[0]
    for needed in (root, *NEEDS_OF.get(root, ()), *NEEDS_OF.get(name, ())):
        if not is_installed(needed):
            return f"{needed} is not installed: {COMMANDS[needed]}"
    return None


def missing_mode(name: str) -> str | None:
    try:
        find_mode(name)
    except UserError as error:
        return str(error)
    return None


def is_installed(name: str) -> bool:
    """Return True if a module can be found, without importing it, or a program is on the PATH."""
    if name in PROGRAMS:
        return shutil.which(name) is not None
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        # the parent package is missing
        return False


def slow_except(quick: Iterable[Any], values: Iterable[Any]) -> list[Any]:
    """Return the values of a parameter, each marked as slow unless it is one of the `quick`."""
    quick, values = list(quick), list(values)
    assert all(value in values for value in quick)
    return [value if value in quick else pytest.param(value, marks=pytest.mark.slow) for value in values]
