"""Search for the modules and files of a program that registered its custom operators."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Hashable, Mapping
from importlib.machinery import EXTENSION_SUFFIXES
from types import FunctionType
from typing import Any

import torch

from opgrip.errors import raise_if_from_program
from opgrip.platform.private_apis import PrivatePlaces

_places = PrivatePlaces()
private_places = _places.report

_definitions: Mapping[str, Any] = _places.take(
    "torch._library.custom_ops.OPDEFS",
    {},
    "traces do not say which module registered an operator that is defined in Python",
)
_describe_registration: Callable[[str], str] = _places.take(
    "torch._C._dispatch_dump",
    lambda name: "",
    "traces do not say which file registered an operator that is defined in a library",
)
_REGISTERED_AT = re.compile(r"^(?:debug|schema): .*registered at (.+\.py):\d+", re.MULTILINE)
_MAIN = ("__main__", "__mp_main__")


def registered_by(name: Hashable) -> str | None:
    """Return the module or file of the program that registered an operator, or that defines a kernel `module:kernel`.

    Return None for operators of torch, and if the module is unknown.
    """
    try:
        if isinstance(name, str):
            module: str | None = name.partition(":")[0]
            return _main() if module in _MAIN else None
        operator: Any = name
        schema = getattr(operator, "_schema", None)
        if schema is None or operator.namespace in ("aten", "prims", "profiler"):
            return None
        definition = _definitions.get(schema.name)
        module = _module_of_file(operator.name()) if definition is None else _module_of(definition._init_fn)
        if module in _MAIN:
            return _main()
        module = module or _library_called(operator.namespace)
        return None if module is None or _is_torch(module) else module
    except Exception as error:
        raise_if_from_program(error)
        return None


def _module_of(function: Any) -> str:
    cells = getattr(function, "__closure__", None) or ()
    functions = [function, *(cell.cell_contents for cell in cells if isinstance(cell.cell_contents, FunctionType))]
    modules = [str(item.__module__) for item in functions]
    return next((module for module in modules if not _is_torch(module)), modules[0])


def _is_torch(module: str) -> bool:
    return module.partition(".")[0] == "torch"


def _main() -> str | None:
    main = vars(sys.modules["__main__"])
    spec, file = main.get("__spec__"), main.get("__file__")
    if spec is not None:
        return str(spec.name)
    return None if file is None else os.path.abspath(file)


def _files() -> dict[str, str]:
    modules = [(name, getattr(module, "__dict__", {})) for name, module in list(sys.modules.items())]
    return {str(names["__file__"]): name for name, names in modules if names.get("__file__")}


def _module_of_file(operator: str) -> str | None:
    place = _REGISTERED_AT.search(_describe_registration(operator))
    return None if place is None else _files().get(place[1])


def _library_called(namespace: str) -> str | None:
    """Return the compiled module whose name ends in a namespace, such as `vllm._C` for `_C`, else the only loaded
    library.
    """
    for file, name in _files().items():
        if name.rpartition(".")[2] == namespace and file.endswith(tuple(EXTENSION_SUFFIXES)):
            return name
    libraries = list(torch.ops.loaded_libraries)
    return libraries[0] if len(libraries) == 1 else None
