"""Import statements of a sample, and the choice of packages that it imports.

A sample imports the standard library, compiled modules, and the widely used packages listed here. Everything else is
included as source: the user's modules, and frameworks such as mmdet, which may not be installed where the sample runs.
"""

from __future__ import annotations

import ast
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.metadata import packages_distributions, version
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opgrip.capture.grip.source.source_files import SourceFile

_WIDELY_USED = """
    PIL addict attr attrs cv2 einops functorch h5py imageio jax jaxlib joblib jsonschema matplotlib ml_dtypes networkx
    numba numpy onnx onnxruntime onnxscript opt_einsum optree packaging pandas psutil pyarrow pycocotools pydantic
    regex requests rich safetensors scipy seaborn shapely six skimage sklearn sympy tensorflow torch torchaudio
    torchgen torchvision tqdm triton typing_extensions xarray yaml
"""
# top-level packages that samples import, in addition to the standard library
IMPORTED = frozenset(_WIDELY_USED.split())

_LIBRARY = Path(sysconfig.get_path("stdlib")).resolve()


def top_level(module: str) -> str:
    """Return the top-level package of a module: `mmdet` for `mmdet.models.losses`."""
    return module.partition(".")[0]


@cache
def is_of_python(module: str) -> bool:
    """Return True for a module of the standard library, and False for a user's module of the same name."""
    name = top_level(module)
    if name not in sys.stdlib_module_names:
        return False
    file = getattr(sys.modules.get(name), "__file__", None)
    return file is None or Path(file).resolve().is_relative_to(_LIBRARY)


def is_imported(module: str) -> bool:
    """Return True if samples import the module with this full name instead of including its source."""
    return top_level(module) in IMPORTED or is_of_python(module) or is_compiled(sys.modules.get(module))


def is_compiled(module: ModuleType | None) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and file.endswith(tuple(EXTENSION_SUFFIXES))


def module_of(thing: Any) -> str | None:
    """Return the name of a module, or the `__module__` of a class or function; None if there is none."""
    name = thing.__name__ if isinstance(thing, ModuleType) else getattr(thing, "__module__", None)
    return name if isinstance(name, str) else None


@cache
def distribution_of(module: str) -> tuple[str, str] | None:
    """Return name and version of the distribution that contains a module, such as `mmsegmentation`, `1.2.2`."""
    names = packages_distributions().get(top_level(module), ())
    return next(((name, version(name)) for name in names), None)


def file_within(module: str, file: str) -> str:
    """Return a source file's path within its project, such as `mmdet/ops/nms.py`."""
    path, depth = Path(file), module.count(".")
    if path.name == "__init__.py":
        depth += 1
    return "/".join(path.parts[-1 - depth :])


WIDTH = 100  # maximum number of characters in a line of an import statement


@dataclass(frozen=True, slots=True)
class Import:
    """An import statement that binds one name.

    module : full name of the module
    attribute : `Tensor` in `from torch import Tensor`; None for `import torch`
    alias : name that the statement binds; empty for `import scipy.optimize`, which binds `scipy`
    """

    module: str
    attribute: str | None
    alias: str

    @property
    def name(self) -> str:
        return self.alias or self.module.partition(".")[0]


def import_of(name: str, attributes: Sequence[str], thing: Any, file: SourceFile | None, package: str) -> Import | None:
    """Return an import statement for a live object, if possible as in the file that uses it; None if none can import
    it.

    name : name by which the code refers to the object
    attributes : attributes read from the name, which determine the submodules to import
    package : package to which relative imports in the file refer
    """
    plain: Import | None = None
    for statement in _bindings(file).get(name, ()) if file is not None else ():
        for candidate in _read(statement, name, package):
            if not is_imported(candidate.module) or not _gives(candidate, thing):
                continue
            if candidate.alias:
                return candidate
            if candidate.module.split(".")[1:] == list(attributes[: candidate.module.count(".")]):
                plain = candidate if plain is None or len(candidate.module) > len(plain.module) else plain
    return plain or _import_by_object(name, thing)


@lru_cache(maxsize=512)
def _bindings(file: SourceFile) -> dict[str, list[ast.Import | ast.ImportFrom]]:
    statements_by_name: dict[str, list[ast.Import | ast.ImportFrom]] = {}
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Import | ast.ImportFrom) and not file.is_inside_function(node):
            for alias in node.names:
                statements_by_name.setdefault(alias.asname or alias.name.partition(".")[0], []).append(node)
    return statements_by_name


def _read(statement: ast.Import | ast.ImportFrom, name: str, package: str) -> list[Import]:
    imports = []
    for alias in statement.names:
        if isinstance(statement, ast.ImportFrom):
            if (alias.asname or alias.name) == name:
                imports.append(Import(source_module(statement, package), alias.name, name))
        elif alias.asname == name or (alias.asname is None and alias.name == name):
            imports.append(Import(alias.name, None, name))
        elif alias.asname is None and alias.name.startswith(name + "."):
            imports.append(Import(alias.name, None, ""))
    return imports


def source_module(statement: ast.ImportFrom, package: str) -> str:
    """Return the full name of the module that a `from` statement in a module of `package` imports from."""
    if not statement.level:
        return statement.module or ""
    parents = package.split(".")
    parents = parents[: len(parents) - statement.level + 1]
    return ".".join([*parents, *([statement.module] if statement.module else [])])


def live_import(module: str, attribute: str | None) -> Any:
    """Return the object that an import statement would bind, without importing anything; None if it is not loaded."""
    if attribute is None:
        return sys.modules.get(module)
    value = getattr(sys.modules.get(module), attribute, None)
    return sys.modules.get(f"{module}.{attribute}") if value is None else value


def _gives(candidate: Import, thing: Any) -> bool:
    module = candidate.module if candidate.alias else candidate.name
    return live_import(module, candidate.attribute) is thing


def _import_by_object(name: str, thing: Any) -> Import | None:
    module = module_of(thing)
    if module is None or not is_imported(module):
        return None
    if isinstance(thing, ModuleType):
        parent, _, last = module.rpartition(".")
        if last == name and parent:
            return Import(parent, last, name)
        return Import(module, None, name)
    own = getattr(thing, "__name__", None)
    if not isinstance(own, str):
        return None
    parts = module.split(".")
    # prefer torch.nn to torch.nn.modules.conv
    for length in range(1, len(parts) + 1):
        prefix = ".".join(parts[:length])
        for attribute in dict.fromkeys((own, name)):
            if getattr(sys.modules.get(prefix), attribute, None) is thing:
                return Import(prefix, attribute, name if attribute != own else own)
    return None


def render(imports: Iterable[Import]) -> str:
    """Return import statements as text in two sections, standard library first."""
    unique_imports = set(imports)
    sections = [{one for one in unique_imports if is_of_python(one.module)}]
    sections.append(unique_imports - sections[0])
    return "\n\n".join("\n".join(_section(section)) for section in sections if section)


def _section(imports: set[Import]) -> list[str]:
    plain = sorted(_plain_statement(one) for one in imports if one.attribute is None)
    merged: dict[str, list[Import]] = {}
    for one in imports:
        if one.attribute is not None:
            merged.setdefault(one.module, []).append(one)
    return plain + [_from_statement(module, merged[module]) for module in sorted(merged, key=str.lower)]


def _plain_statement(one: Import) -> str:
    return f"import {one.module}" + (f" as {one.alias}" if one.alias not in ("", one.module) else "")


def _from_statement(module: str, members: list[Import]) -> str:
    names = [
        f"{one.attribute}" + (f" as {one.alias}" if one.alias != one.attribute else "")
        for one in sorted(members, key=lambda one: _member_order(one.attribute or ""))
    ]
    line = f"from {module} import {', '.join(names)}"
    if len(line) <= WIDTH:
        return line
    return "\n".join([f"from {module} import (", *(f"    {name}," for name in names), ")"])


def _member_order(name: str) -> tuple[int, str]:
    return (0 if name.isupper() and len(name) > 1 else 1 if name[:1].isupper() else 2), name.lower()
