"""Proves that the text of a sample's module stands alone."""

from __future__ import annotations

import ast
import builtins
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from opgrip.capture.grip.source.scopes import bound_by
from opgrip.capture.grip.source.walker import names_of
from opgrip.errors import UserError

_SECONDS = 300

_PROGRAM = """
import sys

# the sample beside could have the name of a module of Python
sys.path[:] = [place for place in sys.path if place]
import importlib.abc
import importlib.util

path, entry, *blocked = sys.argv[1:]


class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"{name} is what a sample does without")


sys.meta_path.insert(0, Blocked())
spec = importlib.util.spec_from_file_location("sample", path)
module = importlib.util.module_from_spec(spec)
# dataclasses look their module up
sys.modules["sample"] = module
spec.loader.exec_module(module)
thing = module
for name in entry.split("."):
    thing = getattr(thing, name)
"""


def check_names(text: str, allowed: Iterable[str]) -> None:
    """Raise `UserError` where a module's text names what it neither defines nor imports.

    Parameters
    ----------
    allowed : names that nothing was bound to where the code comes from either
    """
    tree = ast.parse(text)
    defined_names = {*vars(builtins), *allowed, "__file__"}
    for statement in tree.body:
        defined_names |= bound_by(statement)
    lost = sorted({use.name for statement in tree.body for use in names_of(statement).uses} - defined_names)
    if lost:
        raise UserError(f"the sample would lack {', '.join(lost)}", "this is an error of the gripper: please report it")


def check_import(path: Path, entry: str, blocked: Iterable[str]) -> None:
    """Raise `UserError` where a module cannot be imported by a Python that cannot import the project.

    Parameters
    ----------
    entry : what it has to have: `Coder.decode`
    blocked : top-level packages that are not to be found
    """
    names = sorted(set(blocked) - {"__main__"})
    command = [sys.executable, "-c", _PROGRAM, str(path), entry, *names]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, env=environment, cwd=path.parent
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"{path.name} could not be tried in a fresh Python", str(error)) from error
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"])[-1]
        raise UserError(f"{path.name} does not run without its project", reason)
