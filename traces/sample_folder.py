"""The folder of a sample that was gripped, as one reads it."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from opgrip.traces.errors import UserError, one_line

SAMPLE, CALLS = "sample.json", "calls.jsonl"


@dataclass(frozen=True, slots=True)
class OpenSample:
    """A sample whose code was loaded.

    Attributes
    ----------
    function : takes the recorded arguments: of a method, its object or class comes first
    classes : what the recorded calls name
    origin : of the function, as gripped calls in a trace name it: `module:qualname`
    tags : the words of `opgrip.samples.tags.Tag`
    """

    folder: Path
    name: str
    function: Callable[..., Any]
    classes: Mapping[str, Any]
    origin: str = ""
    tags: frozenset[str] = frozenset()


def open_sample(folder: Path) -> OpenSample:
    """Load the code in a sample's folder, which runs it: for folders that one trusts.

    Raises
    ------
    UserError : where there is no sample, or its code cannot be loaded
    """
    try:
        about = json.loads((folder / SAMPLE).read_text(encoding="utf-8"))
        name, entry, file, classes = (about[key] for key in ("name", "entry", "file", "classes"))
        origin = ":".join(str(about["source"][key]) for key in ("module", "qualname"))
        tags = frozenset(map(str, about.get("tags", ())))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder} is no sample", one_line(error)) from error
    # its own name could be that of an installed package
    spec = spec_from_file_location(f"opgrip_sample_{name}", folder / file)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    # dataclasses look their module up
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
        thing: Any = module
        for part in entry.split("."):
            thing = inspect.getattr_static(thing, part)
    except Exception as error:
        raise UserError(f"the code of the sample {name} cannot be loaded", one_line(error)) from error
    if isinstance(thing, property):
        thing = thing.fget
    namespace = vars(module) | {full: getattr(module, short) for full, short in classes.items()}
    return OpenSample(folder, name, getattr(thing, "__func__", thing), namespace, origin, tags)
