"""Location of a program when it makes a call: module, phase, and the functions on the stack."""

from __future__ import annotations

import inspect
import linecache
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from weakref import ref

import torch
from torch import nn


def qualified_name(code: CodeType, module_globals: dict[str, Any]) -> str:
    name: str | None = getattr(code, "co_qualname", None)
    if name is not None:
        return name
    linecache.lazycache(code.co_filename, module_globals)
    return _names(code.co_filename).get((code.co_name, code.co_firstlineno), code.co_name)


@lru_cache(maxsize=256)
def _names(file: str) -> dict[tuple[str, int], str]:
    try:
        module = compile("".join(linecache.getlines(file)), file, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return {}
    return dict(_inside(module, ""))


def _inside(code: CodeType, prefix: str) -> Iterator[tuple[tuple[str, int], str]]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            name = f"{prefix}{constant.co_name}"
            yield (constant.co_name, constant.co_firstlineno), name
            is_function = bool(constant.co_flags & inspect.CO_OPTIMIZED)
            yield from _inside(constant, f"{name}.<locals>." if is_function else f"{name}.")


FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"

_CALLS_FORWARD = nn.Module._call_impl.__code__
_OF_GRAPHS = "<eval_with_key>"  # prefix of the file name of code that torch generates from a graph
_OF_TRITON = "triton."
_OWN_FOLDERS = (str(Path(torch.__file__).parent) + os.sep, str(Path(__file__).parents[1]) + os.sep)
# packages whose functions are not part of the program; samples and built-in models are
_OWN_PACKAGES = tuple(
    f"opgrip.{package}." for package in ("capture", "cli", "display", "platform", "replay", "tools", "traces", "zoo")
)
_RUNNER = "opgrip.cli.command"  # runs a command of opgrip; outer frames belong to the command


@dataclass(frozen=True, slots=True, eq=False)
class Location:
    """Location of a thread in the program; there is one object per location, so that `is` compares locations.

    module, module_type : path and class of the innermost running module; both empty outside all modules
    phase : `forward`, `backward` or `optimizer`
    autocast : device types for which autocast is on, with dtype, such as `cpu:bfloat16`; empty if it is off
    """

    module: str
    module_type: str
    phase: str
    inside: str | None
    autocast: str
    gripped: bool = False
    modules: dict[int, tuple[ref[nn.Module], Location]] = field(default_factory=dict, repr=False)


class Places:
    def __init__(self) -> None:
        self._places_by_key: dict[tuple[str, str, str, str | None, str, bool], Location] = {}

    def at(
        self,
        module: str = "",
        module_type: str = "",
        phase: str = FORWARD,
        inside: str | None = None,
        autocast: str = "",
        gripped: bool = False,
    ) -> Location:
        key = (module, module_type, phase, inside, autocast, gripped)
        place = self._places_by_key.get(key)
        return self._places_by_key.setdefault(key, Location(*key)) if place is None else place

    def module(self, place: Location, path: str, kind: str) -> Location:
        return self.at(path, kind, place.phase, place.inside, place.autocast, place.gripped)

    def phase(self, place: Location, phase: str) -> Location:
        return self.at(place.module, place.module_type, phase, place.inside, place.autocast, place.gripped)

    def inside(self, place: Location, name: str, gripped: bool = False) -> Location:
        """Return a location like `place`, but inside a recorded call of the function `name`."""
        return self.at(place.module, place.module_type, place.phase, name, place.autocast, gripped)

    def autocast(self, place: Location, autocast: str) -> Location:
        return self.at(place.module, place.module_type, place.phase, place.inside, autocast, place.gripped)


class ModulePaths:
    def __init__(self, model: nn.Module | None = None) -> None:
        self._paths_by_id: dict[int, tuple[ref[nn.Module], str]] = {}
        if model is not None:
            self._name_all(model)

    def of(self, module: nn.Module) -> str | None:
        entry = self._paths_by_id.get(id(module))
        return entry[1] if entry is not None and entry[0]() is module else None

    def called(self, module: nn.Module, above: str | None) -> str:
        path = self.of(module)
        if path is None and above is None:
            self._name_all(module)
            path = ""
        elif path is None:
            # the module above calls this one but has not registered it
            path = ".".join(filter(None, (above, f"({type(module).__name__})")))
            self._paths_by_id[id(module)] = (ref(module), path)
        return path

    def _name_all(self, root: nn.Module) -> None:
        # do not use named_modules, which skips a module that is equal to another one
        queue, visited_ids = [("", root)], set()
        for path, module in queue:
            if id(module) in visited_ids:
                continue
            visited_ids.add(id(module))
            if self.of(module) is None:
                self._paths_by_id[id(module)] = (ref(module), path)
            children = ((name, child) for name, child in module._modules.items() if child is not None)
            queue += [(f"{path}.{name}" if path else name, child) for name, child in children]


@dataclass(frozen=True, slots=True)
class SourceLine:
    function: str
    file: str
    line: int


class SourceLines:
    """Finds the frames of the program on a thread's stack, without frames of torch, Triton and opgrip."""

    def __init__(self, depth: int = 1) -> None:
        self.depth = depth
        self._files: dict[CodeType, str | None] = {}

    def here(self) -> tuple[SourceLine, ...]:
        frame: FrameType | None = sys._getframe(1)
        sites: list[SourceLine] = []
        while frame is not None and len(sites) < self.depth:
            code = frame.f_code
            if frame.f_globals.get("__name__") == _RUNNER:
                break
            if code not in self._files:
                self._files[code] = _short_name(code.co_filename, frame.f_globals.get("__name__"))
            file = self._files[code]
            if file is not None:
                sites.append(SourceLine(qualified_name(code, frame.f_globals), file, frame.f_lineno or 0))
            frame = frame.f_back
        return tuple(sites)


def innermost_module() -> nn.Module | None:
    """Return the module whose method, such as `head.loss`, is innermost on this thread's stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _CALLS_FORWARD:
        names = frame.f_code.co_varnames
        is_graph = frame.f_code.co_filename.startswith(_OF_GRAPHS)
        if names and names[0] == "self" and not is_graph and frame.f_trace is None:
            variables = frame.f_locals
            owner = variables.get("self")
            if sys.version_info < (3, 13):
                # before Python 3.13 this is a copy that would keep the variables' values alive
                variables.clear()
            if isinstance(owner, nn.Module):
                return owner
        frame = frame.f_back
    return None


def is_running(frame: FrameType) -> bool:
    above: FrameType | None = sys._getframe(1)
    while above is not None:
        if above is frame:
            return True
        above = above.f_back
    return False


def _short_name(file: str, module: object) -> str | None:
    if file.startswith((*_OWN_FOLDERS, _OF_GRAPHS)) or str(module).startswith((_OF_TRITON, *_OWN_PACKAGES)):
        return None
    if isinstance(module, str) and module != "__main__" and file.endswith(".py"):
        path = module.replace(".", "/")
        return f"{path}/__init__.py" if Path(file).name == "__init__.py" else f"{path}.py"
    here = os.getcwd() + os.sep
    return file.removeprefix(here)
