"""Which packages a sample imports, and which it takes in as source.

The rule: what belongs to Python, what is compiled, and the widely used packages listed here are imported. Everything
else is taken in as source: the project that the function comes from, modules and scripts of the user's own, and the
frameworks below them (mmdet, mmseg, mmcv, mmengine, detectron2, timm, ...), which someone who runs the sample need not
have.
"""

from __future__ import annotations

import sys
import sysconfig
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.metadata import packages_distributions, version
from pathlib import Path
from types import ModuleType
from typing import Any

_WIDELY_USED = """
    PIL addict attr attrs cv2 einops functorch h5py imageio jax jaxlib joblib jsonschema matplotlib ml_dtypes networkx
    numba numpy onnx onnxruntime onnxscript opt_einsum optree packaging pandas psutil pyarrow pycocotools pydantic
    regex requests rich safetensors scipy seaborn shapely six skimage sklearn sympy tensorflow torch torchaudio
    torchgen torchvision tqdm triton typing_extensions xarray yaml
"""
IMPORTED = frozenset(_WIDELY_USED.split())
"""Top-level packages that are imported, besides those of Python itself."""

_LIBRARY = Path(sysconfig.get_path("stdlib")).resolve()


def top_level(module: str) -> str:
    """`mmdet` of `mmdet.models.losses`."""
    return module.partition(".")[0]


@cache
def is_of_python(module: str) -> bool:
    """Whether a module is of the standard library; a user's own one of the same name is not."""
    name = top_level(module)
    if name not in sys.stdlib_module_names:
        return False
    file = getattr(sys.modules.get(name), "__file__", None)
    return file is None or Path(file).resolve().is_relative_to(_LIBRARY)


def is_imported(module: str) -> bool:
    """Whether a sample imports a module, named in full, rather than takes in its source."""
    return top_level(module) in IMPORTED or is_of_python(module) or is_compiled(sys.modules.get(module))


def is_compiled(module: ModuleType | None) -> bool:
    """Whether a module is an extension, of which there is no source to take in."""
    file = getattr(module, "__file__", None)
    return file is not None and file.endswith(tuple(EXTENSION_SUFFIXES))


def module_of(thing: Any) -> str | None:
    """The name of the module that a module, class or function is or says that it is of; None where it does not say."""
    name = thing.__name__ if isinstance(thing, ModuleType) else getattr(thing, "__module__", None)
    return name if isinstance(name, str) else None


@cache
def distribution_of(module: str) -> tuple[str, str] | None:
    """Name and version of the distribution that a module is installed by: `mmsegmentation`, `1.2.2`; None for none."""
    names = packages_distributions().get(top_level(module), ())
    return next(((name, version(name)) for name in names), None)


def file_within(module: str, file: str) -> str:
    """A source file as one names it within its project, which tells nothing of this machine: `mmdet/ops/nms.py`.

    Parameters
    ----------
    module : in full, `mmdet.ops.nms`; `__main__` for a script or a notebook
    file : where it lies here
    """
    path, depth = Path(file), module.count(".")
    if path.name == "__init__.py":
        depth += 1
    return "/".join(path.parts[-1 - depth :])
