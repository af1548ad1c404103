"""Extraction of a function's source from its project, as the gripper does it, and import of the result."""

import inspect
import sys
from types import ModuleType
from typing import Any

import torch

from opgrip.capture.grip.gripped import Gripped, GrippedCall
from opgrip.capture.grip.sample_folder import check_names
from opgrip.capture.grip.source.module import ModuleText, lay_out, requirements_of


def extract(function: Any, *calls: tuple[Any, ...], owner: type | None = None, entry: str = "") -> ModuleText:
    """Return the text of a sample's module, after checking that it defines all names that it uses."""
    kept = [GrippedCall(args, {}, None, None, None, 0, 0, 0) for args in calls]
    entry = entry or getattr(function, "__qualname__", "function").rpartition("<locals>.")[2]
    gripped = Gripped(function, owner, entry, "function", frozenset(), kept)
    made = lay_out(gripped, requirements_of(gripped), "a test")
    check_names(made.text, made.absent)
    lines = made.text.splitlines()
    assert not [line for line in lines if line != line.rstrip()]
    return made


def load_extracted(made: ModuleText) -> ModuleType:
    assert not [word for word in made.text.split() if word.startswith("gripped_project")]
    module = ModuleType("sample")
    sys.modules["sample"] = module
    exec(compile(made.text, "sample.py", "exec"), vars(module))
    return module


def entry_of(made: ModuleText) -> Any:
    thing: Any = load_extracted(made)
    for name in made.entry.split("."):
        thing = inspect.getattr_static(thing, name)
    return getattr(thing, "__func__", thing)


def check_same_results(function: Any, *args: Any, **keywords: Any) -> ModuleText:
    made = extract(function)
    one, other = function(*args, **keywords), entry_of(made)(*args, **keywords)
    assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    return made
