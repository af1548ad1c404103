"""The extension modules that a trace may use, and the errors for cases that cannot run on this machine."""

from __future__ import annotations

import importlib
import mmap
import os
import shlex
import signal
import subprocess
import sys
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec, PathFinder
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from opgrip.cli.command import own_python
from opgrip.errors import UserError

IMPORT_S = 120
IMPORTED = 76  # exit status that confirms an import; if the module ends the process itself, the exit status differs

MMCV = "mmcv._ext"
# extension modules that a trace may use without being named by the user; an untrusted trace cannot add to them
TRUSTED_EXTENSIONS = (MMCV,)
ALL_OF_TORCH = "torch"  # among the extensions if operators of torch may run that were not reviewed


# a trace may name any code of this machine, and what it does with it
LOOK_FOR = "if you know the module or file that has its code, name it with --extension"
_LIBRARIES = tuple(EXTENSION_SUFFIXES)  # file suffixes of compiled modules and libraries


def extension_of(text: str) -> str:
    """Return a value of `--extension`, with a file's path made absolute so that it works from any working directory."""
    return os.path.abspath(text) if _is_file(text) else text


def module_of(extension: str) -> str:
    return os.path.basename(extension).partition(".")[0] if _is_file(extension) else extension


def _is_file(extension: str) -> bool:
    return os.sep in extension or extension.endswith((".py", *_LIBRARIES))


def import_trusted(name: str) -> ModuleType:
    torch = sys.modules.get("torch")
    # calls are replayed without gradients, which a script may need when it is imported
    with nullcontext() if torch is None else torch.enable_grad():
        if _is_file(name):
            return _import_file(name)
        with _working_directory():
            return importlib.import_module(name)


def _import_file(path: str) -> ModuleType:
    name = module_of(path)
    loaded = sys.modules.get(name)
    if loaded is not None and getattr(loaded, "__file__", None) != path:
        # such as a file that is named like a module of Python; the name of a library must not change
        name = f"{zlib.crc32(path.encode()):08x}.{name}"
        loaded = sys.modules.get(name)
    if loaded is not None:
        return loaded
    if not os.path.isfile(path):
        raise ImportError(f"{path} does not exist")
    # the file may import its neighbours, also later
    sys.path.append(os.path.dirname(path))
    spec = spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is neither a Python file nor a library")
    try:
        module = sys.modules[name] = module_from_spec(spec)
        spec.loader.exec_module(module)
    except BaseException as error:
        sys.modules.pop(name, None)
        if not path.endswith(_LIBRARIES) or "PyInit" not in str(error):
            raise
        import torch

        # a library of operators that is not a Python module
        torch.ops.load_library(path)
        module = sys.modules[name] = ModuleType(name)
        module.__file__ = path
    return module


@contextmanager
def _working_directory() -> Iterator[None]:
    sys.path.append("")
    try:
        yield
    finally:
        sys.path.remove("")


class Unsupported(Exception):
    """Raised if a case cannot run on this machine or in this mode; the message is the reason."""


class Untrusted(Unsupported):
    """Raised if an operator or function belongs to a module that the user has not named with `--extension`.

    extension : installed extension of torch to name with `--extension`; None if the trace names anything else
    """

    def __init__(self, subject: str, extension: str | None) -> None:
        self.subject = subject
        self.extension = extension if extension is not None and is_torch_extension(extension) else None
        super().__init__(
            f"{subject} is not trusted: {f'name {self.extension} with --extension' if self.extension else LOOK_FOR}"
        )

    def with_command(self, trace: str, extensions: Iterable[str]) -> str:
        if self.extension is None:
            return str(self)
        words = [word for name in (*extensions, self.extension) for word in ("--extension", name)]
        return f"{self.subject} is not trusted: run it with opreplay {shlex.join([trace, *words])}"


def absent_extensions(names: Iterable[str]) -> Iterator[str]:
    for name in names:
        if _is_file(name):
            if not os.path.isfile(name):
                yield f"--extension {name} does not exist, so its functions cannot run"
        elif not is_installed(name):
            yield f"--extension {name}: no such module is installed, so its functions cannot run"


def is_installed(name: str) -> bool:
    """Return True if a module can be found, without importing its parent packages."""
    return _spec_of(name) is not None


@cache
def is_torch_extension(name: str) -> bool:
    """Return True if a module is an installed library that is linked with torch, and no part of torch."""
    spec = None if name.startswith(f"{ALL_OF_TORCH}.") else _spec_of(name)
    path = Path((spec and spec.origin) or "")
    if not path.name.endswith(_LIBRARIES) or not {"site-packages", "dist-packages"} & {*path.parts}:
        return False
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return any(content.find(library) >= 0 for library in (b"libc10.", b"libtorch"))


def _spec_of(name: str) -> ModuleSpec | None:
    first, *others = name.split(".")
    full_name = first
    try:
        with _working_directory():
            spec = find_spec(first)
        for part in others:
            places = None if spec is None else spec.submodule_search_locations
            if places is None:
                return None
            full_name = f"{full_name}.{part}"
            spec = PathFinder.find_spec(full_name, list(places))
    except (ImportError, ValueError):
        return None
    return spec


def check_import(name: str) -> None:
    try:
        done = subprocess.run(
            own_python(__name__, name), capture_output=True, text=True, errors="replace", timeout=IMPORT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise UserError(f"--extension {name} cannot be imported: it took longer than {IMPORT_S} s") from error
    if done.returncode != IMPORTED:
        ended = f"status {done.returncode}" if done.returncode >= 0 else signal.strsignal(-done.returncode)
        reason = next(reversed(done.stderr.split("\n")[:-1]), "") or f"its process ended: {ended}"
        raise UserError(f"--extension {name} cannot be imported: {reason}")


if __name__ == "__main__":
    import_trusted(sys.argv[1])
    os._exit(IMPORTED)
